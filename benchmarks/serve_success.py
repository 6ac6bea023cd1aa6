"""Success of a trained model through `gspo-env serve`, and in its own evaluation.

    gspo-env train --output runs/served
    python benchmarks/serve_success.py runs/served --tasks 256        # about 2 minutes
    python benchmarks/serve_success.py runs/thinks --train-thinking 20   # 3 minutes more

With `--train-thinking` it trains the run first: a tiny model that reasons before each action, with
a template that leaves the reasoning of earlier answers out of the prompt.

A plain HTTP client plays the held-out tasks: it sends the whole conversation with the tools in
each request, as any program does, and gives what the assistant said to the environment. The agent's
own evaluation plays the same tasks. Expected: the success of each lies within the other's interval.
"""

from __future__ import annotations

import argparse
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.serve import Serve, policy_of, settings
from gspo_env.compare.stats import success_interval
from gspo_env.config import Config
from gspo_env.env.base import TextEnvironment
from gspo_env.env.info import read_prompt
from gspo_env.env.registration import make_env
from gspo_env.env.tools import format_tool_call, split_reasoning, tool_call_frames
from gspo_env.recipes.base import Recipe
from gspo_env.recipes.embedded import (
    TEMPLATE,
    build_model,
    build_tokenizer,
    demonstrate,
    imitation_samples,
    warm_up,
)
from gspo_env.recipes.tiny import Tiny
from gspo_env.rollout import ChatTokenizer
from gspo_env.serving import Address, Session
from gspo_env.types import Episode, Task
from gspo_envs.lookup import LookupEnv


def to_action(message: dict[str, str | list[dict[str, dict[str, str]]] | None]) -> str:
    """Returns what the environment reads of an answer."""
    calls = message.get("tool_calls") or []
    written = [
        format_tool_call(c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in calls
        if isinstance(c, dict)
    ]
    return "\n".join(filter(None, [str(message["content"] or ""), *written]))


def play(session: Session, env: TextEnvironment, task: Task, most: int) -> bool:
    """Plays one task; returns whether it succeeded."""
    observation, _ = env.reset(seed=task.seed, options=dict(task.options))
    prompt = read_prompt(env)
    messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    messages.append({"role": "user", "content": observation})
    tools = [tool.schema for tool in prompt.tools]
    headers = {"authorization": f"Bearer {session.key}"}
    with httpx.Client(base_url=session.url, headers=headers, timeout=600) as client:
        for _ in range(most):
            body = {"model": "m", "messages": messages, "tools": tools}
            got = client.post("/chat/completions", json=body)
            if got.status_code == 400:  # the context is full
                return False
            choice = got.raise_for_status().json()["choices"][0]
            if choice["finish_reason"] == "length":
                return False
            observation, _, done, cut, info = env.step(to_action(choice["message"]))
            if done or cut:
                return bool(info.get("success", info.get("episodic_reward", 0) > 0))
            role = info.get("observation_role", "user")
            messages += [choice["message"], {"role": role, "content": observation}]
            if role == "tool":
                calls = choice["message"].get("tool_calls") or [{"id": "none"}]
                messages[-1]["tool_call_id"] = calls[-1]["id"]
    return False


THINKS = TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.last and m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}",
)
"""Shows the reasoning of the last message only."""


class ThinkingLookup(LookupEnv):
    """Takes as the answer what follows the reasoning, as programs do."""

    def on_final(self, text: str) -> tuple[str, float, bool]:
        """Leaves the reasoning out."""
        return super().on_final(split_reasoning(text)[1] or "")


def train_thinking(folder: str, steps: int, seed: int = 0) -> None:
    """Trains a tiny model that reasons: it names the word that it goes on with."""
    env_id, recipe = (
        f"{Path(__file__).resolve()}:ThinkingLookup",
        Tiny(demonstrations=1000, imitation_steps=300, initializer_range=0.02),  # measured so
    )
    env = make_env(env_id)
    tasks = [Task(env_id=env_id, seed=10_000_000 + n) for n in range(recipe.demonstrations)]
    shown = [thinking(episode) for episode in demonstrate(env, tasks, recipe.slips)]
    texts = {text for e in shown for turn in e.turns for text in (turn.text, turn.observation)}
    texts |= {shown[0].prompt.system or "", *(tool.name for tool in shown[0].prompt.tools)}
    frames = [frame for tool in shown[0].prompt.tools for frame in tool_call_frames(tool)]
    tokenizer = build_tokenizer(texts, frames)
    tokenizer.chat_template = THINKS
    model = build_model(recipe, len(tokenizer), tokenizer.eos_token_id, seed)
    samples = imitation_samples(shown, ChatTokenizer(tokenizer))
    warm_up(model, samples, recipe, seed, lambda step, loss: None)
    config = Config.from_recipe(
        Recipe(),
        env=env_id,
        steps=steps,
        tasks_per_step=16,
        eval_tasks=256,
        eval_every=0,
        rollout={"max_turn_tokens": 32, "max_context": 512},
        loss={"clip_low": 0.03, "clip_high": 0.05},
        learner={"learning_rate": 1e-3, "warmup_steps": 20},
        tracker="none",
        output=folder,
    )
    agent = GSPOAgent(model, config=config, tokenizer=tokenizer)
    history = [metrics for _, metrics in agent.train()]
    agent.close()
    counts = [m["rollout/sequences_per_episode"] for m in history if "train/loss" in m]
    worst = max(m.get("train/logprob_diff_max", 0.0) for m in history)
    print(f"trained: {counts[-1]:.1f} sequences an episode, engine against trainer {worst:.1e}")


def thinking(episode: Episode) -> Episode:
    """Returns an episode whose actions begin with reasoning."""
    turns = []
    for turn in episode.turns:
        word = re.findall(r'"key": "(\w+)"|<answer>(\w+)', turn.text)
        thought = "".join(word[0]) if word else "?"
        turns.append(replace(turn, text=f"<think>{thought}</think>{turn.text}"))
    return replace(episode, turns=tuple(turns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run")
    parser.add_argument("--tasks", type=int, default=256)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--train-thinking", type=int, default=0, help="steps of training")
    args = parser.parse_args()
    if args.train_thinking:
        train_thinking(args.run, args.train_thinking)
    agent = GSPOAgent.load(args.run)
    split = agent.split(args.tasks)
    groups = agent.evaluate(len(split.tasks))
    own = [bool(e.success) for group in groups for e in group.episodes]
    agent.close()
    kwargs, most = agent.config.env_kwargs, agent.config.rollout.max_turns
    with policy_of(args.run, settings(Serve(model=args.run))) as policy:
        address = Address()
        session = address.open(policy, training=False)

        def one(task: Task) -> bool:
            env = make_env(agent.env_id, **kwargs)
            try:
                return play(session, env, task, most)
            finally:
                env.close()

        with ThreadPoolExecutor(args.clients) as pool:
            served = list(pool.map(one, split.tasks))
        address.close()
    for name, wins in (("evaluation", own), ("serve", served)):
        low, high = success_interval([[w] for w in wins])
        print(f"{name:11} {sum(wins) / len(wins):6.1%}  (95 % interval {low:.1%} to {high:.1%})")


if __name__ == "__main__":
    main()
