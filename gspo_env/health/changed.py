"""What has changed since a run was last trained, before it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_env.health.findings import Finding
from gspo_env.user_state import file_digests, training_record


def check_changed_files(folder: Path, settings: Mapping[str, Any]) -> list[Finding]:
    """Returns a finding if files that settings name have changed since the run was last trained.

    Args:
        folder: Folder of the run.
        settings: Settings that may name files.
    """
    trained = training_record(folder).get("files") or {}
    files = file_digests(settings).items()
    names = [name for name, digest in files if trained and digest not in trained.values()]
    if not names:
        return []
    text = f"{', '.join(names)} has changed since this run was last trained."
    advice = "Results before and after may not be comparable."
    return [Finding(name="changed_file", text=text, advice=advice)]
