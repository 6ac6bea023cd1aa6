"""Prints where the time of the default training goes.

    python benchmarks/default_run.py [--steps 30]

The parts are seconds of the processor, and their shares: importing, the warm-up, and the rollouts,
updates and evaluations of the training. The rest is the check of the model, the tracker,
checkpoints and kept episodes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

TIMES: Counter[str] = Counter()


def timed(owner: Any, name: str, part: str) -> None:
    """Adds the time of each call of an async function to a part."""
    function: Callable[..., Any] = getattr(owner, name)

    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            return await function(*args, **kwargs)
        finally:
            TIMES[part] += time.process_time() - started

    setattr(owner, name, wrapped)


def main() -> None:
    """Trains once and prints the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    from gspo_agents.gspo import GSPOAgent
    from gspo_env.config import Config
    from gspo_env.rollout.collector import Collector
    from gspo_env.training import loop
    from gspo_env.training.rollout_buffer import RolloutBuffer

    TIMES["imports"] = time.process_time()
    timed(RolloutBuffer, "take", "rollouts")
    timed(RolloutBuffer, "run", "updates")
    timed(Collector, "collect_evaluation", "evaluations")
    timed(loop.Loop, "_sync", "weights and probe")
    with tempfile.TemporaryDirectory() as folder:
        config = Config.from_recipe(steps=steps, output=f"{folder}/run")
        started = time.process_time()
        agent = GSPOAgent(config=config)
        agent.warm_up()
        TIMES["warm-up"] = time.process_time() - started
        agent.train()
    total = time.process_time()
    TIMES["rest"] = total - TIMES.total()
    print(f"{total:.1f} s of the processor for {steps} steps")
    for part, seconds in TIMES.most_common():
        print(f"{part:20} {seconds:7.1f} s {seconds / total:6.1%}")


if __name__ == "__main__":
    main()
