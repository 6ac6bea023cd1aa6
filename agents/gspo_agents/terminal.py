"""What a training run prints at its start, while its episodes are played, and at its end."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from gspo_env.config import Config
from gspo_env.env.registration import format_env
from gspo_env.errors import figure
from gspo_env.redaction import redact
from gspo_env.registry import BUILTIN, name_of
from gspo_env.runs.evaluations import EvalSnapshot, may_be_chance, success_interval
from gspo_env.runs.names import (
    AS_SHIPPED,
    IMITATION_PASS,
    IMITATION_PASS_LAST,
    IMITATION_STEP,
)
from gspo_env.runs.run import History
from gspo_env.tracking.console import Progress
from gspo_env.tracking.multi import parts
from gspo_env.training.split import Split
from gspo_env.types import Episode

_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
"""Bars of a curve, for terminals with Unicode and without."""
_WIDE = 0.3
"""Width of a 95 % interval of success from which there are too few episodes."""
_PATIENCE = 5.0
"""Seconds between two lines of an `EpisodeCounter`."""
_WIDTH = 60
"""Maximum characters of a curve."""


def opening(config: Config, env_id: str, model: Any, folder: Path, how_to_look: str) -> str:
    """Returns a table of what is trained, where, and for how long.

    Args:
        config: The settings.
        env_id: The environment.
        model: The model.
        folder: Folder of the run.
        how_to_look: The tracker's command or address; may be empty.
    """
    kwargs = json.dumps(redact(dict(config.env_kwargs)), default=repr) if config.env_kwargs else ""
    kwargs = kwargs if len(kwargs) <= 80 else f"{kwargs[:77]}..."
    env = env_id if isinstance(config.env, str) else format_env(config.env)
    tracker = ", ".join(parts(config.tracker))
    weights = next(model.parameters())
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    size = f"{millions / 1e3:.3g} billion" if millions >= 1e3 else f"{millions:.3g} million"
    dtype = str(weights.dtype).removeprefix("torch.")
    rows = {
        "environment": f"{env} {kwargs}".rstrip(),
        "model": f"{config.model or name_of('recipe', config.recipe)}, {type(model).__name__}, "
        f"{size} parameters, {dtype}",
        "device": f"{_device(weights.device)}, engine {name_of('engine', config.engine)}",
        "training": f"{_many(config.steps, 'step')} of {_many(config.tasks_per_step, 'task')} with "
        f"{_many(config.rollout.group_size, 'episode')} each",
        "folder": str(folder),
        "tracker": f"{tracker} ({how_to_look})" if how_to_look else tracker,
    }
    if flags := own_classes(config):
        rows["own classes"] = f"train --resume will need {flags}"
    return "\n".join(f"{name:<13}{value}" for name, value in rows.items())


def own_classes(config: Config) -> str:
    """Returns the flags that a resume needs for classes that only this script or notebook finds."""
    return " ".join(filter(None, (_flag(kind, getattr(config, kind)) for kind in BUILTIN)))


def _flag(kind: str, choice: Any) -> str:
    """Returns the flag that a resume needs for a class that only this script or notebook finds."""
    where, _, name = name_of(kind, choice).rpartition(":")
    file = getattr(sys.modules.get(where), "__file__", None)
    folder = Path(file).parent if file else None
    is_beside = folder is not None and str(folder) == sys.path[0] and folder != Path.cwd()
    if where != "__main__" and not is_beside:
        return ""
    return f"--{kind} {os.path.relpath(file) if file else 'FILE.py'}:{name}"


def closing(
    history: History,
    folder: Path,
    encoding: str = "utf-8",
    *,
    tasks: int = 0,
    more: str = "",
    resume: str = "",
) -> list[str]:
    """Returns the curve of a finished run, and the commands for the next steps.

    Args:
        history: The metrics of every step.
        folder: Folder of the run.
        encoding: The terminal's encoding.
        tasks: Episodes of an evaluation. The best checkpoint is named if it exists and is better
            than the last.
        more: The flag with which a resumed run has steps left; by default twice the steps.
        resume: The command that resumes the run, if it needs more than the folder.
    """
    evaluations = [(step, m) for step, m in history if "eval/success" in m]
    # the return, where success never changes
    success = {m["eval/success"] for _, m in evaluations}
    returns = {m.get("eval/return") for _, m in evaluations}
    name = "eval/return" if len(success) == 1 and len(returns) > 1 else "eval/success"
    values = [(step, m[name]) for step, m in evaluations if name in m]
    best_step, best = max(values, key=lambda pair: pair[1])
    curve = sparkline([value for _, value in values], encoding)
    form = ".1%" if name == "eval/success" else ".3g"
    first, final, top = (figure(value, form) for value in (values[0][1], values[-1][1], best))
    run = shlex.quote(str(folder))
    resume = resume or f"gspo-env train --resume {run}"
    return [
        f"Model, config and learning curve: {folder}",
        f"{name} {curve} from {first} to {final}, best {top} after step {best_step}",
        *_better_checkpoint(history, folder, tasks),
        f"View:      gspo-env view {run}",
        f"Evaluate:  gspo-env evaluate {run}",
        f"Resume:    {resume} {more or f'--steps {2 * history[-1][0] or 1}'}",
    ]


def _better_checkpoint(history: History, folder: Path, tasks: int) -> list[str]:
    """Names the best checkpoint, if it is better than the last."""
    snapshots = [
        EvalSnapshot.from_metrics(step, metrics, tasks)
        for step, metrics in history
        if "eval/success" in metrics
    ]
    if worse := _worse_than_before(snapshots):
        return [worse]
    evaluations = [e for e in snapshots if e.step > 0]
    checkpoint = folder / "checkpoints" / "best"
    if len(evaluations) < 2 or not (checkpoint / "model").is_dir():
        return []
    best, last = max(evaluations, key=lambda e: e.success), evaluations[-1]
    if best.success <= last.success:
        return []
    chance = may_be_chance(best, last, len(evaluations))
    return [
        f"Best {best.success:.1%} at step {best.step} is in checkpoints/best, the last is "
        f"{last.success:.1%}{', which may be chance' if chance else ''}: "
        f"gspo-env evaluate {shlex.quote(str(checkpoint))}"
    ]


def _worse_than_before(evaluations: Sequence[EvalSnapshot]) -> str:
    """Says that no evaluation is as good as the one before training; empty if one is."""
    if len(evaluations) < 2 or evaluations[0].step:
        return ""
    (first, *others), last = evaluations, evaluations[-1]
    if any(e.success >= first.success for e in others):
        return ""
    chance = may_be_chance(first, last, len(others))
    return (
        f"Training made it worse: {first.success:.1%} before, {last.success:.1%} after"
        f"{', which may be chance' if chance else ''}. Lower --learner.learning-rate, or raise "
        "--tasks-per-step."
    )


def start_of(config: Config) -> str:
    """Says when the first evaluation is played: an imitation comes before it."""
    return "after imitation" if getattr(config.recipe, "imitation_steps", 0) else "before training"


def results(
    history: History, split: Split, left_out: int, start: str = "before training"
) -> list[str]:
    """Returns what a run has reached, with an interval, and what it left out.

    Args:
        history: The metrics of every step.
        split: The tasks of the evaluation.
        left_out: Demonstrations of held-out tasks.
        start: See `start_of`.
    """

    def total(name: str) -> float:
        return sum(metrics.get(name, 0.0) for _, metrics in history)

    evaluations = [metrics for _, metrics in history if "eval/success" in metrics]
    first, last = evaluations[0], evaluations[-1]
    count = len(split.tasks)
    wins = round(last["eval/success"] * count)
    rows = [[float(n < wins)] for n in range(count)]
    low, high = success_interval(rows, tasks=split.distinct)
    few = ": too few to judge" if high - low > _WIDE else ""
    ends = [(first, start), (last, "after training")][: len(evaluations)]
    sampled = ", ".join(f"{each['eval/success']:.1%} {when}" for each, when in ends)
    sampled = _as_shipped(first) + sampled
    greedy = " and ".join(f"{each['eval/success_greedy']:.1%}" for each, _ in ends)
    after = "after " * (len(ends) > 1)
    lines = [
        f"Success on {split}: {sampled} (greedy {greedy}); "
        f"95 % interval {after}{low:.0%} to {high:.0%}{few}."
    ]
    if step := first.get(IMITATION_STEP):
        lines.append(
            f"Imitation kept the weights after step {step:.0f}: pass@k {first[IMITATION_PASS]:.1%} "
            f"on training tasks, and {first[IMITATION_PASS_LAST]:.1%} after the last step."
        )
    if skipped := total("train/skipped_steps"):
        lines.append(f"Optimiser steps skipped, because a number was not finite: {skipped:.0f}.")
    redrawn = total("rollout/redrawn_tasks")
    if redrawn or left_out:
        lines.append(
            f"Held out for evaluation: {left_out} demonstrations skipped, "
            f"{redrawn:.0f} training task{'s' * (redrawn != 1)} redrawn."
        )
    return lines


def _as_shipped(first: Mapping[str, float]) -> str:
    success = first.get(AS_SHIPPED)
    return "" if success is None else f"{success:.1%} as shipped, "


def summary(history: History, started: float, start: str = "before training") -> str:
    """Returns what a run has reached and the command that started it, in Markdown.

    Args:
        history: The metrics of every step; empty at the start.
        started: The start of the run, in seconds since 1970.
        start: See `start_of`.
    """
    lines = []
    if evaluations := [(step, m["eval/success"]) for step, m in history if "eval/success" in m]:
        shipped = _as_shipped(next(m for _, m in history if "eval/success" in m))
        best_step, best = max(evaluations, key=lambda pair: pair[1])
        last_step, last = evaluations[-1]
        lines.append(
            f"Success on held-out tasks: **{last:.1%}** after step {last_step}, "
            f"{shipped}{evaluations[0][1]:.1%} {start}, best {best:.1%} after step {best_step}."
        )
        lines.append(f"Duration: {timedelta(seconds=round(time.time() - started))}.")
    command = shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "gspo-env"), *sys.argv[1:]])
    return "\n\n".join([*lines, f"    {command}\n"])


class EpisodeCounter:
    """Shows how many episodes of those that a person waits for are over, if that takes long.

    Args:
        progress: Where it is shown.
    """

    def __init__(self, progress: Progress) -> None:
        self._show = progress.when_slow(_PATIENCE)
        self.expect(0)

    def expect(self, episodes: int) -> None:
        """Begins to count."""
        self._expected, self._ended, self._tokens = episodes, 0, 0
        self._began = time.monotonic()

    def add(self, episode: Episode) -> None:
        """Counts an episode that is over."""
        self._ended += 1
        self._tokens += episode.model_tokens
        rate = self._tokens / max(1e-6, time.monotonic() - self._began)
        if self._ended <= self._expected:  # others replace groups without variance, or play ahead
            self._show("episodes", self._ended, self._expected, tokens_per_second=rate)


def sparkline(values: Sequence[float], encoding: str = "utf-8") -> str:
    """Draws values as bars from the least to the greatest; thins them out if there are too many.

    Example:
        >>> sparkline([0.0, 0.5, 1.0])
        '▁▅█'
    """
    drawn = _BARS.encode(encoding, "replace").decode(encoding) == _BARS
    bars = _BARS if drawn else _PLAIN_BARS
    count = min(len(values), _WIDTH)
    places = [round(n * (len(values) - 1) / max(1, count - 1)) for n in range(count)]
    low, high = min(values[n] for n in places), max(values[n] for n in places)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((values[n] - low) * scale)] for n in places)


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _device(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device.type} with {_many(torch.get_num_threads(), 'thread')}"
