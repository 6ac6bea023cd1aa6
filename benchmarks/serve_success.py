"""Success of a trained model through `gspo-env serve`, and in its own evaluation.

    gspo-env train --output runs/served
    python benchmarks/serve_success.py runs/served --tasks 256        # about 2 minutes

A plain HTTP client plays the held-out tasks: it sends the whole conversation with the tools in
each request, as any program does, and gives what the assistant said to the environment. The agent's
own evaluation plays the same tasks. Expected: the success of each lies within the other's interval.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.serve import Serve, policy_of, settings
from gspo_env.compare.stats import success_interval
from gspo_env.env.base import TextEnvironment
from gspo_env.env.info import read_prompt
from gspo_env.env.registration import make_env
from gspo_env.env.tools import format_tool_call
from gspo_env.serving import Address, Session
from gspo_env.types import Task


def to_action(message: dict[str, str | list[dict[str, dict[str, str]]] | None]) -> str:
    """What the environment reads of an answer."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run")
    parser.add_argument("--tasks", type=int, default=256)
    parser.add_argument("--clients", type=int, default=32)
    args = parser.parse_args()
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
