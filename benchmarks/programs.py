"""Programs as environments: their cost, what they leave behind, their failures, and learning.

`python benchmarks/programs.py load` plays 256 programs at once against an engine that answers at
once, and then 1,000 episodes. It prints our own processor time a turn and what is left of them.
`... faults` trains while 20 % of the programs crash, hang or send garbage, and compares our counts
with those of the programs. `... forms` trains the four look-up agents of `examples/agents` and the
native environment from one start that imitated captured conversations; it needs the extra `agents`
and node. One training takes 40 s of the processor for the native environment, 5 minutes for a
Python agent, of which most is its client, and longer for node, of which each episode is a process:
more than an hour in all. `--arms`, `--seeds`, `--steps` and `--tasks` make it shorter.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import json
import logging
import math
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.capture import to_lines
from gspo_env.config import Config
from gspo_env.env.registration import make_env
from gspo_env.env.tools import format_tool_call
from gspo_env.importing import load_module
from gspo_env.recipes.base import Recipe
from gspo_env.recipes.embedded import build, imitation_samples, warm_up
from gspo_env.recipes.tiny import Tiny
from gspo_env.rollout.play import play_now
from gspo_env.rollout.pool import EnvPool
from gspo_env.rollout.retry import play_pooled
from gspo_env.rollout.transcript import ChatTokenizer
from gspo_env.types import Task

ENV = "gspo/Program-v0"
EXAMPLES = Path(__file__).parents[1] / "examples" / "agents"
TASKS = load_module(str(EXAMPLES / "lookup_tasks.py"))
TURNS = 8
LIMITS = {"max_turn_tokens": 32, "max_context": 512}
FORMS: dict[str, dict[str, Any]] = {
    "openai": {"program": f"{EXAMPLES / 'lookup_openai.py'}:run"},
    "openai-agents": {"program": f"{EXAMPLES / 'lookup_openai_agents.py'}:run"},
    "langgraph": {"program": f"{EXAMPLES / 'lookup_langgraph.py'}:run"},
    "node": {"command": ["node", str(EXAMPLES / "lookup.js")]},
}
CLIENT_SECONDS: list[float] = []
"""Processor seconds of each program's own thread."""


def chats(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Asks several times with a client of its own, as agents do."""
    began = time.thread_time()
    messages = [{"role": "user", "content": task["question"]}]
    head = {"Authorization": f"Bearer {api_key}"}
    with httpx2.Client(base_url=base_url, headers=head, timeout=600) as http:
        for _ in range(TURNS):
            answer = http.post("/chat/completions", json={"model": "m", "messages": messages})
            message = answer.raise_for_status().json()["choices"][0]["message"]
            messages += [message, {"role": "user", "content": "and then?"}]
    CLIENT_SECONDS.append(time.thread_time() - began)
    return 1.0


SHOWN: set[str] = set()
"""Errors that were printed."""


async def play_many(pool: EnvPool, episodes: int, at_once: int) -> Counter[str]:
    gate = asyncio.Semaphore(at_once)

    async def one(seed: int) -> str:
        async with gate:
            task = Task(env_id=ENV, seed=seed)
            played = await play_pooled(pool, task, lambda now: "something", timeout=120.0)
            if played.error and played.error not in SHOWN:
                SHOWN.add(played.error)
                print(played.error)
            return str(played.stop_reason)

    return Counter(await asyncio.gather(*(one(seed) for seed in range(episodes))))


def left() -> dict[str, int]:
    """Counts what this process has open."""
    gc.collect()
    me = psutil.Process()
    return {
        "sockets": len(me.net_connections()),
        "descriptors": me.num_fds(),
        "threads": threading.active_count(),
        "asyncio tasks": sum(
            issubclass(type(o), asyncio.Task) and not o.done() for o in gc.get_objects()
        ),
        "children": len(me.children(recursive=True)),
    }


def load(options: argparse.Namespace) -> None:
    """Measures our own processor time a turn, and counts what is left after the episodes."""
    data = [{"question": f"question {n}"} for n in range(64)]
    commands = options.command.split() if options.command else None
    program: dict[str, Any] = {"command": commands} if commands else {"program": chats}
    kwargs = {**program, "data": data, "held_out": 0}
    warm = EnvPool(lambda: make_env(ENV, **kwargs))
    asyncio.run(play_many(warm, 4, 4))  # starts the address
    warm.close()
    before = left()
    for name, episodes, at_once in (("256 at once", 512, 256), ("1,000 episodes", 1000, 64)):
        CLIENT_SECONDS.clear()
        pool = EnvPool(lambda: make_env(ENV, **kwargs))
        processor, began = time.process_time(), time.perf_counter()
        stops = asyncio.run(play_many(pool, episodes, at_once))
        pool.close()
        wall, processor = time.perf_counter() - began, time.process_time() - processor
        turns = episodes * TURNS
        own = processor - sum(CLIENT_SECONDS)
        print(f"{name:16} {dict(stops)}")
        print(f"{'':16} {1000 * own / turns:.2f} ms a turn of our own processor time,", end=" ")
        print(f"{1000 * sum(CLIENT_SECONDS) / turns:.2f} ms of the clients,", end=" ")
        print(f"{1000 * wall / turns:.2f} ms in all")
    deadline = time.monotonic() + 10
    while (after := left()) != before and time.monotonic() < deadline:
        time.sleep(0.2)
    for kind, count in after.items():
        print(f"{kind:16} {before[kind]} before, {count} after")


COUNTS: Counter[str] = Counter()
"""What the unreliable programs did."""
_LOCK = threading.Lock()
SILENCE = 20.0
"""Seconds; a busy machine must not make a program silent that does not hang."""


def count(kind: str) -> None:
    with _LOCK:
        COUNTS[kind] += 1


def unreliable(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    """The look-up agent, of which one in five crashes, hangs, exits or sends garbage first."""
    kind = random.choice(("crash", "hang", "exit", "garbage")) if random.random() < 0.2 else "fine"
    if kind in ("fine", "garbage"):
        count(kind)
    head = {"Authorization": f"Bearer {api_key}"}
    with httpx2.Client(base_url=base_url, headers=head, timeout=60) as http:
        if kind == "garbage":
            for body in (b"{no json", b"\xff" * 1000, b'{"messages": 7}'):
                http.post("/chat/completions", content=body)
        result = follow(task, http, None if kind in ("fine", "garbage") else kind)
    return result


def follow(task: dict[str, Any], http: httpx2.Client, fault: str | None) -> str:
    messages: list[Any] = [
        {"role": "system", "content": task["prompt"]},
        {"role": "user", "content": task["question"]},
    ]
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": parameters}}]
    while True:
        answer = http.post("/chat/completions", json={"messages": messages, "tools": tools})
        message = answer.raise_for_status().json()["choices"][0]["message"]
        if fault is not None:  # not before: some episodes are only reset, to see their task
            count(fault)
        if fault == "crash":
            raise OSError("the disk is full")
        if fault == "exit":
            raise SystemExit(3)
        if fault == "hang":
            time.sleep(SILENCE + 2)
            raise OSError("its episode has ended")
        messages.append(message)
        if not message.get("tool_calls"):
            return str(message["content"])
        for call in message["tool_calls"]:
            key = json.loads(call["function"]["arguments"]).get("key")
            word = task["links"].get(str(key), "unknown key")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": word})


def lookup(folder: Path, **kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of the look-up task."""
    data = folder / "lookup.jsonl"
    if not data.exists():
        data.write_text("".join(f"{json.dumps(TASKS.make_task(n))}\n" for n in range(2000)))
    rewards = [f"{EXAMPLES / 'lookup_tasks.py'}:{name}" for name in ("right", "hops")]
    return {"data": str(data), "rewards": rewards, "success": 1.0, "max_turns": 8, **kwargs}


def captured(folder: Path, count: int, slips: float = 0.1, early: float = 0.5) -> Path:
    """Plays the plain agent with a scripted policy and writes the conversations to a file.

    A word is wrong with probability `slips`, and a share of the episodes answers one hop early. The
    file has the form that `gspo-env capture` writes and `--conversations` reads.
    """
    env = make_env(ENV, **lookup(folder, **FORMS["openai"]))
    episodes = []
    for n in range(count):
        rng, row = random.Random(n), n % 1800
        task = TASKS.make_task(row)
        hops = len(task["path"]) - (rng.random() < early)

        def act(now: Any, task: Any = task, hops: int = hops, rng: Any = rng) -> str:
            word = now.observation.split('"')[1] if now.turn == 0 else now.observation
            word = rng.choice(list(task["links"])) if rng.random() < slips else word
            if now.turn >= hops:
                return f"<answer>{word}</answer>"
            return format_tool_call("lookup", {"key": word})

        episodes.append(play_now(env, Task(env_id=ENV, seed=n, options={"row": row}), act))
    env.close()
    played = [episode for episode in episodes if not episode.failed]
    right = np.mean([bool(episode.success) for episode in played])
    print(f"captured {len(played)} of {count} conversations, {right:.0%} of them right", flush=True)
    path = folder / "captured.jsonl"
    path.write_text("".join(f"{line}\n" for episode in played for line in to_lines(episode)))
    return path


def imitating(folder: Path, options: argparse.Namespace) -> tuple[Any, Any]:
    """Builds the tiny model and lets it imitate captured conversations of the plain agent."""
    path, native = captured(folder, options.captured), "gspo/Lookup-v0"
    config = Tiny(conversations=str(path), imitation_steps=options.imitation_steps)
    model, tokenizer, episodes = build({native: make_env(native)}, config, 0)
    samples = imitation_samples(episodes, ChatTokenizer(tokenizer))
    warm_up(model, samples, config, 0, lambda step, loss: None)
    return model, tokenizer


def train(
    start: tuple[Any, Any], env: str, kwargs: dict[str, Any], seed: int, options: Any
) -> tuple[GSPOAgent, list[dict[str, float]]]:
    """Trains a copy of the start; returns the metrics of each step."""
    config = Config.from_recipe(
        Recipe(),
        env=env,
        env_kwargs=kwargs,
        seed=seed,
        steps=options.steps,
        tasks_per_step=options.tasks,
        eval_every=options.steps,
        eval_tasks=options.eval_tasks,
        rollout=LIMITS,
        loss={"clip_low": 0.03, "clip_high": 0.05},
        learner={
            "learning_rate": options.learning_rate,
            "warmup_steps": options.warmup_steps,
        },
        tracker="none",
        output=tempfile.mkdtemp(prefix="programs-"),
    )
    model, tokenizer = copy.deepcopy(start[0]), start[1]
    agent = GSPOAgent(model, config=config, tokenizer=tokenizer)
    COUNTS.clear()
    return agent, [metrics for _, metrics in agent.train()]


def faults(options: argparse.Namespace) -> None:
    """Trains while one program in five fails, and compares the counts of both sides."""
    with tempfile.TemporaryDirectory() as name:
        start = imitating(Path(name), options)
        kwargs = lookup(Path(name), program=unreliable, silence=SILENCE)
        agent, history = train(start, ENV, kwargs, 0, options)
    agent.close()
    total: Counter[str] = Counter()
    for metrics in history:
        for kind in ("env_errors", "env_timeouts", "retried", "lost_episodes"):
            total[kind] += int(metrics.get(f"rollout/{kind}", 0) + metrics.get(f"eval/{kind}", 0))
    print(f"programs   {dict(COUNTS)}")
    print(f"counted    {dict(total)}")
    print(
        f"errors     {COUNTS['crash'] + COUNTS['exit']} of programs, {total['env_errors']} counted"
    )
    print(f"hangs      {COUNTS['hang']} of programs, {total['env_timeouts']} counted")
    success = [m["eval/success"] for m in history if "eval/success" in m]
    print(f"success    {success[0]:.1%} -> {success[-1]:.1%} in {options.steps} updates")


def forms(options: argparse.Namespace) -> None:
    """Trains each form of the agent and the native environment from one start."""
    results: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        start = imitating(Path(name), options)
        arms = {form: lookup(Path(name), **program) for form, program in FORMS.items()}
        for arm in options.arms:
            for seed in range(options.seeds):
                began = time.perf_counter()
                env = "gspo/Lookup-v0" if arm == "native" else ENV
                agent, history = train(start, env, arms.get(arm, {}), seed, options)
                agent.close()
                success = [m["eval/success"] for m in history if "eval/success" in m]
                worst = max(m.get("train/logprob_diff_max", 0.0) for m in history)
                results.setdefault(arm, []).append(success[-1])
                print(
                    f"{arm:14} seed {seed}: success {success[0]:.1%} -> {success[-1]:.1%}, engine "
                    f"against trainer {worst:.1e}, {time.perf_counter() - began:.0f} s",
                    flush=True,
                )
    print(f"| form | success after {options.steps} steps | difference to native, points |")
    print("|---|---|---|")
    native = float(np.mean(results.get("native", [math.nan])))
    for arm, found in results.items():
        mean = float(np.mean(found))
        print(f"| {arm} | {mean:.1%} | {100 * (mean - native):+.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("load", "faults", "forms"))
    parser.add_argument("--command", default="", help="load: a command in place of the function")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tasks", type=int, default=16, help="tasks of a step")
    parser.add_argument("--eval-tasks", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=("native", *FORMS), default=["native", *FORMS])
    parser.add_argument("--captured", type=int, default=1000, help="conversations to imitate")
    parser.add_argument("--imitation-steps", type=int, default=250)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup-steps", type=int, default=5)
    options = parser.parse_args()
    logging.getLogger("gspo_env").setLevel(logging.CRITICAL)
    {"load": load, "faults": faults, "forms": forms}[options.what](options)


if __name__ == "__main__":
    main()
