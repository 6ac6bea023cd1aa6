"""What tests of whole runs share."""

from __future__ import annotations


def timeless(history):
    """A history without times and rates."""
    return [
        (step, {k: v for k, v in m.items() if "time/" not in k and "per_second" not in k})
        for step, m in history
    ]
