"""Finding environments by name."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint

import gymnasium
import pytest
from support.small_env import Small

import gspo_env
from gspo_env.check import check_env
from gspo_env.config import Config
from gspo_env.env import registration
from gspo_env.env.base import TextEnv
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, EnvironmentContractError, UnknownEnvironmentError

FILE_ENV = '''
from __future__ import annotations
from gspo_env import ToolEnv, tool

class CornerEnv(ToolEnv):
    """A corner shop."""

    @tool
    def ask(self, what: str) -> str:
        """Ask for something."""
        return what

class NotAnEnv:
    pass
'''


def test_registered_ids_and_module_forms_resolve():
    assert gspo_env.resolve_env("gspo/Lookup-v0") == "gspo/Lookup-v0"
    assert gspo_env.resolve_env("gspo_envs.text.lookup:gspo/Lookup-v0") == "gspo/Lookup-v0"
    assert gspo_env.resolve_env("gspo_envs.text.lookup:LookupEnv") == "custom/LookupEnv-v0"
    assert gspo_env.make_env("custom/LookupEnv-v0").reset(seed=1)


def test_a_class_in_a_file_resolves_and_follows_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    path = tmp_path / "corner.py"
    path.write_text(FILE_ENV)
    written = path.stat()
    env_id = gspo_env.resolve_env(f"{path}:CornerEnv")
    assert env_id == "custom/CornerEnv-v0"
    assert gspo_env.resolve_env(f"{path}:CornerEnv") == env_id
    assert [t.name for t in gspo_env.make_env(env_id).get_wrapper_attr("tools")] == ["ask"]
    with pytest.raises(UnknownEnvironmentError, match="no environment 'NotAnEnv'"):
        gspo_env.resolve_env(f"{path}:NotAnEnv")
    path.write_text(FILE_ENV.replace("ask", "beg"))
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))  # as if in the same second
    env = gspo_env.make_env(f"{path}:CornerEnv")
    assert [t.name for t in env.get_wrapper_attr("tools")] == ["beg"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gspo/Lokup-v0", "did you mean gspo/Lookup-v0"),
        ("lookup-v0", "gspo/Lookup-v0"),
        (
            "Mine-v0",
            "A class is FILE.py:Mine-v0; MODULE:Mine-v0 imports a module that registers it",
        ),
        ("custom/Yes-v0", "FILE.py:Yes, or, before it, gspo_env.resolve_env(Yes)."),
        ("gspo/GEM-v0", "no built-in adapter; docs/built-in.md shows how to write one."),
        ("gspo/Recurring-v0", "it is studies/diagnostics.py:RecurringEnv in the repository."),
        ("", "expected one of"),
        ("no_such_module:Env", "cannot be imported"),
        (":Env", "cannot be imported"),
        ("gspo_envs.text.lookup:LokupEnv", "it has LookupEnv"),
        ("no/such/file.py:Env", "does not exist"),
        ("~nosuchuser/file.py:Env", "does not exist"),
        ("mine.py", "expected mine.py:ClassName"),
    ],
)
def test_unknown_names_are_one_clear_error(monkeypatch, spec, message):
    monkeypatch.delitem(gymnasium.registry, "custom/Yes-v0", raising=False)  # of another test
    with pytest.raises(UnknownEnvironmentError) as caught:
        gspo_env.resolve_env(spec)
    assert message in str(caught.value)


def test_a_class_needs_no_file_and_anything_else_is_one_clear_error():
    class Yes(Small):
        """Defined in a cell of a notebook."""

        def step(self, action):
            return "", float(action == "yes"), True, False, {"success": action == "yes"}

    assert gspo_env.resolve_env(Yes) == "custom/Yes-v0"
    assert isinstance(gspo_env.make_env(Yes).unwrapped, Yes)
    assert check_env(Yes).declares_success
    assert Config(env=Yes).env == "custom/Yes-v0"
    assert Config(env=[Yes, "gspo/Lookup-v0"]).env == ("custom/Yes-v0", "gspo/Lookup-v0")
    for wrong in (Yes(), str, 3, None, [Yes()]):
        with pytest.raises(ConfigError, match=r"^env is .*; expected an id, FILE.py:CLASS or a"):
            Config(env=wrong)


def test_another_class_with_the_name_of_the_first_is_said(caplog):
    def defined(place: str) -> type:
        return type("Twice", (Small,), {"__qualname__": f"{place}.Twice"})

    for place, lines in [("a", 0), ("a", 0), ("b", 1), ("b", 1)]:
        found = defined(place)
        assert gspo_env.make_env(found).unwrapped.__class__ is found
        assert len(caplog.records) == lines
    assert "custom/Twice-v0 is now" in caplog.text
    assert caplog.text.rstrip().endswith("a.Twice")


def test_threads_get_their_own_of_two_files_classes_of_one_name(tmp_path):
    words = ["apple", "pear"]
    for word in words:
        (tmp_path / f"{word}.py").write_text(
            f"from support.small_env import Small\n\nclass Shop(Small):\n    word = {word!r}\n"
        )

    def made(word: str) -> set[str]:
        spec = f"{tmp_path / word}.py:Shop"
        return {gspo_env.make_env(spec).get_wrapper_attr("word") for _ in range(300)}

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(made, words * 2)) == [{word} for word in words * 2]
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("suffix", [".py", ""])
@pytest.mark.parametrize("code", ["1 / 0", "class E(:", "raise SystemExit(3)", "int('x')"])
def test_a_file_or_module_that_raises_is_an_error_that_says_so(tmp_path, monkeypatch, code, suffix):
    name = f"bad_{len(code)}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownEnvironmentError, match=r"cannot be imported: .*raised \w+"):
        gspo_env.resolve_env(f"{name}{suffix}:Env")


def test_arguments_reach_the_environment_and_bad_ones_are_named():
    env = gspo_env.make_env("gspo/Lookup-v0", hops=(3, 3))
    assert env.reset(seed=0)[0].startswith("Follow 3 links")
    near = r"with.*'hop'(, did you mean hops\?|\. Did you mean 'hops'\?)$"  # Python 3.13 says it
    with pytest.raises(ConfigError, match=near):
        gspo_env.make_env("gspo/Lookup-v0", hop=3)
    with pytest.raises(ConfigError, match="expected 1 <= hops"):
        gspo_env.make_env("gspo/Lookup-v0", hops=(3, 2))
    with pytest.raises(ConfigError, match=r"gspo/Dataset-v0 cannot be made.*'data'"):
        make_env("gspo/Dataset-v0")


def test_an_environment_without_its_methods_or_without_text_is_refused():
    class Still(TextEnv):
        """Has no step."""

    with pytest.raises(EnvironmentContractError, match="Still has no step; expected both methods"):
        make_env(Still)
    with pytest.raises(EnvironmentContractError, match=r"observation_space is Box.*expected text"):
        gspo_env.make_env("CartPole-v1")

    class Bare(gymnasium.Env):
        """Declares no spaces."""

    with pytest.raises(EnvironmentContractError, match=r"observation_space is None.*as TextEnv"):
        gspo_env.make_env(Bare)


def test_a_file_of_the_working_folder_is_found_without_its_suffix(monkeypatch, tmp_path):
    (tmp_path / "without_suffix.py").write_text(
        "import gspo_env\n\n\nclass Mine(gspo_env.TextEnv):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])  # as the command's
    assert gspo_env.resolve_env("without_suffix:Mine").startswith("custom/Mine")
    with pytest.raises(UnknownEnvironmentError, match="without_suffix has no environment 'Other'"):
        gspo_env.resolve_env("without_suffix:Other")


def test_environments_are_described():
    described = {env.id: env for env in gspo_env.describe_envs()}
    assert described["gspo/Calculator-v0"].tools == ("add", "subtract", "multiply")
    assert described["gspo/GuessNumber-v0"].tools == ()
    assert described["gspo/Lookup-v0"].summary.startswith("Follow a chain")


def _register_plugin() -> None:
    gymnasium.register(id="plugin/Shop-v0", entry_point="gspo_envs.text.lookup:LookupEnv")


def _broken_plugin() -> None:
    raise RuntimeError("broken plugin")


def test_plugins_are_loaded_and_a_broken_one_is_only_logged(monkeypatch, caplog):
    group = registration.ENTRY_POINT_GROUP
    points = [EntryPoint(name, f"plugin:{name}", group) for name in ("bad", "good")]
    found = {"bad": _broken_plugin, "good": _register_plugin}
    monkeypatch.setattr(EntryPoint, "load", lambda self: found[self.name])
    monkeypatch.setattr(registration, "entry_points", lambda group: points)
    registration.register_builtin()
    assert "entry point bad" in caplog.text
    assert "plugin/Shop-v0" in [env.id for env in gspo_env.describe_envs()]
