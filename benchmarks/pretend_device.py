"""Trains the default recipe on a CPU and on a pretend GPU, and compares all metrics.

    python benchmarks/pretend_device.py --steps 3

The pretend GPU of the tests computes on the CPU and raises where tensors of two devices meet. The
command prints where the host waited for the device, and how often. Exit code 1 if a metric differs.

A GPU in float32 attends to shared prefixes with a mask, which adds in another order than a CPU.
Training makes such differences larger, so both take the kernel of the CPU here. The tests compare
the GPU's own ways with it.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from pretend_device import pretend_gpu

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import from_dict
from gspo_env.model.tree_attention import TreeAttention, _Tree


def main() -> None:
    """Prints the comparison and the waits."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--imitation-steps", type=int, default=None, help="the recipe's by default")
    arguments = parser.parse_args()
    here = trained(arguments.steps, arguments.imitation_steps)
    with patch.object(TreeAttention, "_masked", cpu_kernel), pretend_gpu() as gpu:
        there = trained(arguments.steps, arguments.imitation_steps)
    worst = compare(here, there)
    print(f"\nplaces where the host waited for the device, or copied to it:\n{gpu}")
    sys.exit(worst > 0)


def cpu_kernel(tree: Any, q: Any, k: Any, v: Any, scale: float, window: int | None) -> Any:
    """Attends to shared prefixes as on a CPU."""
    assert window is None
    return _Tree.apply(q, k, v, scale, tree)


def trained(steps: int, imitation_steps: int | None) -> list[tuple[int, dict[str, float]]]:
    """The metrics of the default recipe after some of its steps."""
    tree: dict[str, Any] = {"steps": steps, "tracker": "none"}
    if imitation_steps is not None:
        tree["recipe"] = {"imitation_steps": imitation_steps}
    with tempfile.TemporaryDirectory() as folder:
        return GSPOAgent(config=from_dict({**tree, "output": f"{folder}/run"})).train()


def compare(here: Any, there: Any) -> float:
    """Prints every metric that differs; returns the largest difference, inf for other metrics."""
    worst, equal = 0.0, 0
    for (step, metrics), (_, found) in zip(here, there, strict=True):
        if metrics.keys() != found.keys():
            return math.inf
        for name, value in metrics.items():
            if name.startswith("time/") or name.endswith("_per_second"):
                continue
            gap = abs(value - found[name]) / max(1.0, abs(value))
            worst, equal = max(worst, gap), equal + (gap == 0)
            if gap:
                print(f"step {step}: {name} is {value:.9g} and {found[name]:.9g}")
    print(f"{equal} values are equal, the largest relative difference is {worst:.2g}")
    return worst


if __name__ == "__main__":
    main()
