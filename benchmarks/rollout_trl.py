"""Compares the rollout with TRL's: the same model, tasks, number of episodes and limits.

    python benchmarks/rollout_trl.py DIR [--rounds 5] [--start FOLDER]

DIR has TRL: see `time_to_success.py`, whose settings are used. TRL plays the look-up environment
by its own interface, with `transformers`. Each call of its rollout (`_generate`: no resets, rewards
and log-probabilities of the learner) is followed by one of ours, resets included. The rates are
sampled tokens in a second of the processor, with one thread. FOLDER has a saved model of the
default recipe; without one it is trained.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from common import collect, cpu_seconds, load_player, make_collector, show
from time_to_success import CONTEXT, GROUP, TASKS, TURN, make_start, theirs


def sampled(completions: list[list[int]], masks: list[list[int]] | None) -> int:
    """Returns how many tokens TRL's model has sampled; the others are the tools'."""
    if masks is None:
        return sum(map(len, completions))
    return sum(sum(mask) for mask in masks)


def main() -> None:
    """Prints the rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", help="the folder with TRL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--start", default="", help="a saved model of the default recipe")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rollout-trl-"))
    start = Path(arguments.start or folder / "start")
    if not arguments.start:
        make_start(start)
    from gspo_env.rollout.settings import RolloutConfig

    limits = RolloutConfig(group_size=GROUP, max_turn_tokens=TURN, max_context=CONTEXT)
    collector = make_collector(load_player(start), limits)
    sys.path.append(arguments.packages)
    trainer = theirs(start, folder / "steps.jsonl", 0, arguments.rounds + 1)
    generate, rates = trainer._generate, ([], [])

    def both(prompts: Any) -> Any:
        completions: list[Any] = []
        taken = cpu_seconds(lambda: completions.append(generate(prompts)))
        rates[0].append(sampled(completions[0][1], completions[0][2]) / taken)
        groups: list[Any] = []
        taken = cpu_seconds(lambda: groups.extend(collect(collector, TASKS, len(rates[0]))))
        rates[1].append(sum(e.model_tokens for g in groups for e in g.episodes) / taken)
        return completions[0]

    trainer._generate = both
    trainer.train()
    show("TRL", rates[0][1:], "sampled tokens/s")
    show("ours", rates[1][1:], "sampled tokens/s")
    pairs = [own / other for other, own in zip(*(r[1:] for r in rates), strict=True)]
    print(f"ratio {median(pairs):.2f} (wanted: at least 6)")


if __name__ == "__main__":
    main()
