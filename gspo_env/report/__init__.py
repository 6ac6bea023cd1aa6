"""What a person looks at: learning curves and readable episodes."""

from __future__ import annotations

from gspo_env.report.text import render_episode

__all__ = ["render_episode"]
