"""Loads the tiny random models that `tests/architectures.py` builds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

_FILE = Path(__file__).parent / "architectures.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("architectures_program", _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROGRAM = _load()
