"""Reads the folder of a run as data: settings, metrics, warnings and how it ended.

The run may be finished, killed, still running, or of an older version. Nothing in the folder is
executed, and what is missing or damaged is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gspo_env.episodes.page import read_points
from gspo_env.errors import OutputError
from gspo_env.files import check_folder, parse_toml
from gspo_env.health.record import RunRecord
from gspo_env.redaction import redact_text
from gspo_env.tracking.base import MODEL, flatten
from gspo_env.tracking.jsonl import METRICS
from gspo_env.training.checkpoints import FAILURE

CONFIG = "config.toml"
_MAX_BYTES = 1 << 20
"""Bytes of a text file that are read."""


def read_run(folder: str | Path) -> RunRecord:
    """Reads a run.

    Raises:
        OutputError: This is not the folder of a run.
    """
    path = Path(folder)
    try:
        if not (path / METRICS).is_file():
            raise OutputError(f"{str(folder)!r} has no {METRICS}; expected the folder of a run")
        check_folder(path)
        points = read_points(path)
    except OSError as error:
        raise OutputError(f"cannot read {str(path / METRICS)!r}: {error.strerror}") from error
    config = _read(path / CONFIG)
    settings = _settings(config)
    return RunRecord.of(
        settings,
        {name: (steps, values) for name, (steps, values) in points.items()},
        folder=path,
        name=path.resolve().name,
        config=config,
        dtype=_trained_dtype(path, settings),
        warnings=tuple(line for line in _read(path / "warnings.txt").splitlines() if line),
        failure=_read(path / FAILURE).strip(),
        environment_error=_read(path / "first-environment-error.txt").strip(),
        finished=(path / MODEL).is_dir(),
    )


def runs_in(folder: str | Path) -> list[Path]:
    """Returns the runs in a folder by name; the folder itself if it is a run, or has none."""
    path = Path(folder)
    if (path / METRICS).is_file() or not path.is_dir():
        return [path]
    return sorted(p for p in path.iterdir() if (p / METRICS).is_file()) or [path]


def _settings(text: str) -> dict[str, Any]:
    try:
        return flatten(parse_toml(text))
    except (ValueError, RecursionError):
        return {}


def _read(path: Path) -> str:
    """Reads the beginning of a text, without secrets; empty if there is none."""
    if not path.is_file():  # a pipe or a device may never end
        return ""
    try:
        with path.open("rb") as file:
            return redact_text(file.read(_MAX_BYTES).decode(errors="replace"))
    except OSError:
        return ""


def _trained_dtype(folder: Path, settings: dict[str, Any]) -> str:
    """Returns the dtype of the weights as the settings or a saved model name it, else nothing."""
    dtype = str(settings.get("model_dtype", ""))
    if dtype not in ("", "auto"):
        return dtype
    for model in (folder / MODEL, *sorted(folder.glob("checkpoints/*/model"))):
        text = _read(model / "config.json")
        if match := re.search(r'"(?:torch_)?dtype"\s*:\s*"(\w+)"', text):
            return match[1]
    return ""
