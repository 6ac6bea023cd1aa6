"""Controlled comparison: arms over problems and paired seeds, in parallel, resumable.

A problem is a config; an arm is a set of changes to it. Every arm of a problem starts, for a seed,
from the same warmed-up model and meets the same tasks, with the same number of episodes and
updates. Each run writes its own file when it ends, so a comparison that was stopped goes on.
"""

from gspo_env.compare.plan import Arm, Comparison, change, grid, parse
from gspo_env.compare.play import Result, Run, compare, planned, read

__all__ = [
    "Arm",
    "Comparison",
    "Result",
    "Run",
    "change",
    "compare",
    "grid",
    "parse",
    "planned",
    "read",
]
