"""What a training run says in the terminal at its start and at its end."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_env.config import Config
from gspo_env.env.registration import format_env
from gspo_env.health.collapse import EvalSnapshot, may_be_chance
from gspo_env.redaction import redact
from gspo_env.registry import name_of
from gspo_env.tracking.multi import parts

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=+*%#"
"""The same for a terminal that has no Unicode."""
_WIDTH = 60
"""Maximum characters of a curve."""

History = Sequence[tuple[int, Mapping[str, float]]]


def opening(config: Config, env_id: str, model: Any, folder: Path, how_to_look: str) -> str:
    """Returns a table of what is trained, where, and for how long.

    Args:
        config: The settings.
        env_id: The environment.
        model: The model.
        folder: Folder of the run.
        how_to_look: The tracker's command or address; may be empty.
    """
    size, tasks = config.rollout.group_size, config.tasks_per_step
    tracker = ", ".join(parts(config.tracker))
    rows = {
        "environment": (env_id if isinstance(config.env, str) else format_env(config.env))
        + _arguments(config.env_kwargs),
        "model": f"{config.model or name_of('recipe', config.recipe)}, {_describe(model)}",
        "device": f"{_device(model)}, engine {name_of('engine', config.engine)}",
        "training": f"{_many(config.steps, 'step')} of {_many(tasks, 'task')} with "
        f"{_many(size, 'episode')} each",
        "folder": str(folder),
        "tracker": f"{tracker} ({how_to_look})" if how_to_look else tracker,
    }
    return "\n".join(f"{name:<13}{value}" for name, value in rows.items())


def closing(
    history: History, folder: Path, encoding: str = "utf-8", *, tasks: int = 0
) -> list[str]:
    """Returns the curve of a run that is finished, and the commands to go on.

    Args:
        history: The metrics of every step.
        folder: Folder of the run.
        encoding: The terminal's encoding.
        tasks: Episodes of an evaluation. The best checkpoint is named where it exists and is better
            than the last by more than chance.
    """
    name, last, at = _curve_metric(history), history[-1][0], shlex.quote(str(folder))
    values = [(step, metrics[name]) for step, metrics in history if name in metrics]
    best_step, best = max(values, key=lambda pair: pair[1])
    curve = sparkline([value for _, value in values], encoding)
    form = "{:.1%}" if name == "eval/success" else "{:.3g}"
    first, final, top = (form.format(value) for value in (values[0][1], values[-1][1], best))
    return [
        f"{name} {curve} from {first} to {final}, best {top} after step {best_step}",
        *_better(history, folder, tasks),
        f"Look:      gspo-env view {at}",
        f"Evaluate:  gspo-env evaluate {at}",
        f"Go on:     gspo-env train --resume {at} --steps {2 * last or 1}",
    ]


def _better(history: History, folder: Path, tasks: int) -> list[str]:
    """Names the best checkpoint, if it is better than the last by more than chance."""
    levels = [
        EvalSnapshot.from_metrics(step, metrics, tasks)
        for step, metrics in history
        if step > 0 and "eval/success" in metrics
    ]
    best = folder / "checkpoints" / "best"
    if len(levels) < 2 or not (best / "model").is_dir():
        return []
    top, last = max(levels, key=lambda level: level.success), levels[-1]
    if may_be_chance(top, last, len(levels)):
        return []
    return [
        f"The model after step {top.step} is better ({top.success:.1%}; the last one has "
        f"{last.success:.1%}): gspo-env evaluate {shlex.quote(str(best))}"
    ]


def sparkline(values: Sequence[float], encoding: str = "utf-8") -> str:
    """Draws values as bars from the least to the greatest; thins out what is too many.

    Example:
        >>> sparkline([0.0, 0.5, 1.0])
        '▁▅█'
    """
    drawn = _BARS.encode(encoding, "replace").decode(encoding) == _BARS
    bars = _BARS if drawn else _PLAIN_BARS
    count = min(len(values), _WIDTH)
    chosen = [values[round(n * (len(values) - 1) / max(1, count - 1))] for n in range(count)]
    low, high = min(chosen), max(chosen)
    if high == low:
        return bars[0] * count
    return "".join(bars[round((v - low) / (high - low) * (len(bars) - 1))] for v in chosen)


def _curve_metric(history: History) -> str:
    """Returns the success of evaluations; their return where success never changes."""
    success = {metrics["eval/success"] for _, metrics in history if "eval/success" in metrics}
    returns = {metrics["eval/return"] for _, metrics in history if "eval/return" in metrics}
    return "eval/return" if len(success) == 1 and len(returns) > 1 else "eval/success"


def _arguments(values: Mapping[str, Any]) -> str:
    if not values:
        return ""
    text = json.dumps(redact(dict(values)), default=repr)
    return f" {text if len(text) <= 80 else text[:77] + '...'}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _describe(model: Any) -> str:
    number = sum(p.numel() for p in model.parameters())
    size = f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return f"{type(model).__name__}, {size} parameters, {dtype}"


def _device(model: Any) -> str:
    import torch

    device = next(model.parameters()).device
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"{device.type} with {_many(threads, 'thread')}"
