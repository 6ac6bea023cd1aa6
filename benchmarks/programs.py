"""Programs as environments: their cost, what they leave behind, and their failures.

`python benchmarks/programs.py load` plays 256 programs at once against an engine that answers at
once, and then 1,000 episodes. It prints our own processor time a turn and what is left of them.
`... faults` trains while 20 % of the programs crash, hang or send garbage, and compares our counts
with those of the programs. Whether agents learn as the native environment does is in `forms.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import psutil
from forms import ENV, add_settings, imitating, lookup, make_agent

from gspo_env.env.registration import make_env
from gspo_env.rollout.pool import EnvPool
from gspo_env.rollout.retry import play_pooled
from gspo_env.types import Task

TURNS = 8
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


def faults(options: argparse.Namespace) -> None:
    """Trains while one program in five fails, and compares the counts of both sides."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        imitating(folder, options)
        kwargs = lookup(folder, program=unreliable, silence=SILENCE)
        evaluations = {"eval_every": options.steps, "eval_tasks": options.eval_tasks}
        agent = make_agent(ENV, kwargs, folder, 0, options, **evaluations)
        COUNTS.clear()
        history = [metrics for _, metrics in agent.train()]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("load", "faults"))
    parser.add_argument("--command", default="", help="load: a command in place of the function")
    parser.add_argument("--eval-tasks", type=int, default=200)
    add_settings(parser)
    options = parser.parse_args()
    logging.getLogger("gspo_env").setLevel(logging.CRITICAL)
    {"load": load, "faults": faults}[options.what](options)


if __name__ == "__main__":
    main()
