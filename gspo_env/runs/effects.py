"""What other settings would do with a kept batch, as `gspo-env whatif` records it.

    RUN/batches/step-000045/whatif.json    the effect of each arm, by its name

The record goes with its batch: a run that is resumed before the step deletes both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from gspo_env.errors import OutputError, raised_as
from gspo_env.files import BATCHES, WHATIF, left_out, read_file, step_folders
from gspo_env.redaction import redact_text, write_text

OWN = "the run's own"
"""The arm with the settings of the run."""
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """What the settings of one arm do with a batch, beside the run's own settings."""

    norm: float
    """Norm of the gradient of the whole batch, at the weights before the update."""
    cosine: float
    """Cosine of that gradient and the run's; NaN if one of them is 0."""
    clipped: float
    """Share of the update's tokens whose gradient the clip blocks."""
    turned_tokens: float
    """Share of the tokens, of those that either trains, whose advantage has the opposite sign."""
    turned_turns: float
    """The same for turns, by the sums of their advantages."""
    best: float
    """Change of the log-probability by the update, the mean over each group's best episodes, nats;
    NaN if the outcomes of no group differ."""
    worst: float
    """The same for each group's worst episodes."""
    outcome: float
    """Predicted change of the mean outcome; see `gspo_agents.whatif.predicted`."""

    def known(self) -> dict[str, float | None]:
        """Returns the numbers by name, as JSON can have them: None for NaN."""
        return {name: v if math.isfinite(v) else None for name, v in asdict(self).items()}


def to_json(effects: Mapping[str, Effect]) -> str:
    """Returns effects as JSON, in which what is not known is null."""
    return json.dumps({name: effect.known() for name, effect in effects.items()}, indent=1)


def write_effects(batch: Path, effects: Mapping[str, Effect]) -> None:
    """Adds effects to the record of a batch, in place of those of the same name.

    Args:
        batch: The folder of the batch.
        effects: By the name of the arm.

    Raises:
        OutputError: The record cannot be written.
    """
    named = {redact_text(name): effect for name, effect in effects.items()}
    with raised_as(OutputError, f"cannot write {str(batch / WHATIF)!r}", OSError):
        write_text(batch / WHATIF, to_json({**_read(batch), **named}))


def read_effects(run: Path) -> dict[int, dict[str, Effect]]:
    """Reads the effects that are recorded in the folder of a run, by step and arm."""
    batches = {int(folder.name[5:]): _read(folder) for folder in step_folders(run / BATCHES)}
    return {step: effects for step, effects in batches.items() if effects}


def _read(batch: Path) -> dict[str, Effect]:
    names = [field.name for field in fields(Effect)]
    with left_out(batch / WHATIF):
        rows = json.loads(read_file(batch, WHATIF, _MAX_BYTES))
        return {
            str(name): Effect(**{key: _number(row[key]) for key in names})
            for name, row in rows.items()
        }
    return {}


def _number(value: object) -> float:
    """Returns a finite number, or NaN for null."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e100:
        raise ValueError(f"{value!r:.80} is not a number")
    return float(value)
