"""Choices are found by name: ours, a plugin's, a user's."""

import dataclasses
import math
import pickle
import typing
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import numpy as np
import pytest
from annotated_types import Ge, Gt, Interval
from support.jails import run_python

from gspo_env.config import Config
from gspo_env.errors import ConfigError
from gspo_env.registry import BUILTIN, _plugins, find, load_module, name_of, names
from gspo_env.settings import settings

PLUGIN = """
from dataclasses import dataclass
from gspo_env.credit import Estimator

@dataclass(frozen=True)
class Flat(Estimator):
    level: float = 1.0
    def advantages(self, group):
        return [[self.level] * len(e.turns) for e in group.episodes]
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """An installed package that announces an estimator."""
    (tmp_path / "flat_credit.py").write_text(PLUGIN)
    info = tmp_path / "flat_credit-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flat-credit\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gspo_env.advantages]\nflat = flat_credit:Flat\n")
    monkeypatch.syspath_prepend(tmp_path)
    _plugins.cache_clear()
    yield
    _plugins.cache_clear()


def test_a_plugins_class_is_found_by_its_entry_point_and_keeps_its_name(plugin):
    flat = find("advantage", "flat")
    assert "flat" in names("advantage")
    assert name_of("advantage", flat(level=2.0)) == "flat"
    with pytest.raises(ConfigError, match="did you mean flat"):
        find("advantage", "flats")


def test_threads_that_load_a_file_at_once_all_get_the_whole_module(tmp_path):
    files = [tmp_path / name for name in ("one.py", "two.py")]
    for file in files:
        file.write_text("import time\ntime.sleep(0.2)\nruns = object()\n")
    with ThreadPoolExecutor(4) as threads:
        runs = list(threads.map(lambda file: load_module(str(file)).runs, files * 2))
    assert runs[:2] == runs[2:]
    assert runs[0] is not runs[1]
    files[0].write_text("raise OSError('no shop')")
    for _ in range(2):  # a file that failed runs again
        with pytest.raises(ImportError, match="no shop"):
            load_module(str(files[0]))


@pytest.mark.parametrize("kind", sorted(BUILTIN))
def test_every_built_in_choice_has_defaults_and_the_name_that_finds_it(kind):
    for name in BUILTIN[kind]:
        assert name_of(kind, find(kind, name)()) == name


def test_no_choice_needs_a_heavy_library_to_be_described():
    code = (
        "import sys; from gspo_env.registry import BUILTIN, find; import gspo_env.config\n"
        "from gspo_env.learner import LearnerConfig, Loss\n"
        "[find(kind, name)() for kind in BUILTIN for name in BUILTIN[kind]]\n"
        "print({'torch', 'transformers', 'mlflow', 'vllm'} & set(sys.modules))"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "set()", done.stderr


def test_neither_environments_nor_what_reads_runs_load_a_heavy_library():
    """A process of an environment would need seconds and 0.3 GB more."""
    code = (
        "import pkgutil, sys, gspo_envs\n"
        "import gspo_env.runs.page, gspo_env.runs.plots, gspo_agents.traces\n"
        "for found in pkgutil.walk_packages(gspo_envs.__path__, 'gspo_envs.'):\n"
        "    __import__(found.name)\n"
        "print(found.name, {'torch', 'transformers', 'mlflow', 'vllm'} & set(sys.modules))"
    )
    done = run_python("-c", code)
    assert done.stdout.strip().endswith(" set()"), done.stderr


@settings
class Settings:
    count: Annotated[int, Ge(1)] = 1
    share: Annotated[float, Interval(ge=0, lt=1)] = 0.5
    size: Annotated[float, Gt(0)] = 1.0
    kind: Literal["a", "b"] = "a"
    maybe: Annotated[float, Gt(0)] | None = None


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("count", 0, "expected a number greater than or equal to 1"),
        ("count", 1e3, "expected a valid integer"),
        ("count", True, "expected a valid integer"),
        ("count", "many", "expected a valid integer"),
        ("share", 1.0, "expected a number less than 1"),
        ("share", math.nan, "expected a finite number"),
        ("size", 0, "expected a number greater than 0"),
        ("size", math.inf, "expected a finite number"),
        ("size", 10**309, "expected at most 9223372036854775807"),
        ("count", 10**19, "expected at most 9223372036854775807"),
        ("kind", "c", "expected 'a' or 'b'"),
        ("maybe", 0, "expected a number greater than 0"),
        ("colour", "red", "unexpected keyword argument"),
    ],
)
def test_a_value_outside_of_its_annotation_is_named_with_what_is_allowed(field, value, allowed):
    with pytest.raises(ConfigError) as caught:
        Settings(**{field: value})
    assert str(caught.value) == f"{field} is {value!r:.100}; {allowed}"


SECTIONS = [Config, *(type(getattr(Config(), f.name)) for f in dataclasses.fields(Config))]
CHOICES = [find(kind, name) for kind in BUILTIN for name in BUILTIN[kind]]


@pytest.mark.parametrize(
    "cls", dict.fromkeys(filter(dataclasses.is_dataclass, [*SECTIONS, *CHOICES]))
)
def test_every_setting_with_bounds_or_a_list_of_values_is_checked(cls):
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        if typing.get_origin(hint) in (Annotated, Literal):
            with pytest.raises(ConfigError, match=f"^{name} is nan; expected"):
                cls(**{name: math.nan})


@pytest.mark.filterwarnings("error")
def test_numbers_of_numpy_and_whole_numbers_are_taken():
    taken = Settings(count=np.int64(3), share=np.float32(0.25), size=2)
    assert dataclasses.astuple(taken) == (3, 0.25, 2.0, "a", None)
    assert pickle.loads(pickle.dumps(taken)) == dataclasses.replace(Settings(), **vars(taken))
