"""Compares the rollout with TRL's: the same model, tasks, number of episodes and limits.

    python benchmarks/rollout_trl.py DIR [--model smollm2] [--rounds 5] [--start FOLDER]

DIR has TRL: see `time_to_success.py`, whose models and settings are used. TRL plays the environment
by its own interface, with `transformers`. Each call of its rollout (`_generate`: no resets, rewards
and log-probabilities of the learner) is followed by one of ours, resets and the start of the engine
included. The rates are sampled tokens in a second of the processor, with one thread. FOLDER has
what that program writes as `start`; without one it is made.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from common import cpu_seconds, show
from time_to_success import GROUP, TRAININGS, make_start, start_agent, theirs


class Enough(Exception):
    """All rounds have been played."""


def sampled(completions: list[list[int]], masks: list[list[int]] | None) -> int:
    """Returns how many tokens TRL's model has sampled; the others are the tools'."""
    if masks is None:
        return sum(map(len, completions))
    return sum(sum(mask) for mask in masks)


def main() -> None:
    """Prints the rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", help="the folder with TRL")
    parser.add_argument("--model", choices=sorted(TRAININGS), default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--start", default="", help="what both start from")
    arguments = parser.parse_args()
    training, rounds = TRAININGS[arguments.model], arguments.rounds
    folder = Path(tempfile.mkdtemp(prefix="rollout-trl-"))
    start = Path(arguments.start or folder / "start")
    if not arguments.start:
        make_start(training, start)
    from gspo_env.types import Task

    agent = start_agent(training, start, 0, eval_tasks=1)
    tasks = [Task(env_id=training.env_id, seed=n) for n in range(training.tasks)]
    sys.path.append(arguments.packages)
    trainer = theirs(training, start, folder / "steps.jsonl", 0, rounds + 1, float("inf"))
    generate, rates = trainer._generate, ([], [])

    def both(prompts: Any) -> Any:
        completions: list[Any] = []
        taken = cpu_seconds(lambda: completions.append(generate(prompts)))
        rates[0].append(sampled(completions[0][1], completions[0][2]) / taken)
        groups: list[Any] = []
        taken = cpu_seconds(lambda: groups.extend(agent.evaluate(tasks, GROUP, len(rates[0]))))
        rates[1].append(sum(e.model_tokens for g in groups for e in g.episodes) / taken)
        if len(rates[0]) > rounds:
            raise Enough
        return completions[0]

    trainer._generate = both
    with contextlib.suppress(Enough):
        trainer.train()
    show("TRL", rates[0][1:], "sampled tokens/s")
    show("ours", rates[1][1:], "sampled tokens/s")
    pairs = [own / other for other, own in zip(*(r[1:] for r in rates), strict=True)]
    print(f"ratio {median(pairs):.2f}")


if __name__ == "__main__":
    main()
