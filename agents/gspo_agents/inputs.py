"""Describes the environments of a run, as inputs that a tracker records."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_env.config import Config
from gspo_env.redaction import redact
from gspo_env.tracking.base import Input
from gspo_env.types import Group


def inputs(
    config: Config, groups: Sequence[Group], num_tasks: Mapping[str, int | None]
) -> Iterator[Input]:
    """Yields each environment as an input of the training and of the evaluation.

    Args:
        config: The settings.
        groups: The episodes of an evaluation.
        num_tasks: The number of tasks that each environment declares, by its `env_id`.
    """
    by_env: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_env[group.task.env_id].append(group)
    for member in config.environments:
        env_id, arguments = member.env_id, redact(dict(member.kwargs))
        source = {"env": member.spec, "arguments": arguments, **_file(member.spec)}
        number, tasks = num_tasks.get(env_id), [_task(group) for group in by_env[env_id]]
        yield Input(
            name=env_id,
            digest=_digest([source, number]),
            context="training",
            source=source,
            profile={"num_tasks": "not declared" if number is None else number},
        )
        yield Input(
            name=env_id,
            digest=_digest([source, tasks]),
            context="evaluation",
            source=source,
            profile={"num_tasks": len(tasks), "distinct_tasks": len({str(t[-1]) for t in tasks})},
        )


def _task(group: Group) -> list[Any]:
    """Returns seed, options and key of a task; the seed stands for a key that is missing."""
    key = next((episode.reset.task_key for episode in group.episodes), None)
    return [group.task.seed, dict(group.task.options), group.task.seed if key is None else key]


def _file(env: str) -> dict[str, str]:
    """Returns the digest of the file of an environment that is `file.py:Class`."""
    path = Path(env.rpartition(":")[0] or env)
    if path.suffix != ".py" or not path.is_file():
        return {}
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]
