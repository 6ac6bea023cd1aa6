"""The environments of one run: names, weights and arguments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_env.cli.main import parse
from gspo_env.config import Config, from_dict, to_dict, to_toml
from gspo_env.env.registration import add_kwargs, label, read_members, resolve_env
from gspo_env.errors import ConfigError, UnknownEnvironmentError
from gspo_env.training.resume import moved_only


@pytest.mark.parametrize(
    ("entry", "name", "spec", "weight"),
    [
        ("gspo/Lookup-v0", "Lookup-v0", "gspo/Lookup-v0", 1.0),
        ("gspo/Lookup-v0:0.7", "Lookup-v0", "gspo/Lookup-v0", 0.7),
        ("package.module:mine/Thing-v0", "Thing-v0", "package.module:mine/Thing-v0", 1.0),
        ("package.module:mine/Thing-v0:3", "Thing-v0", "package.module:mine/Thing-v0", 3.0),
        ("my folder/shop.py:Shop:.5", "Shop", "my folder/shop.py:Shop", 0.5),
        ("a.b-c=shop.py:Shop:1e-2", "a.b-c", "shop.py:Shop", 0.01),
        ("C:\\\\dir\\\\shop.py:Shop2:2", "Shop2", "C:\\\\dir\\\\shop.py:Shop2", 2.0),
    ],
)
def test_an_entry_has_a_name_a_specification_and_a_weight(entry, name, spec, weight):
    member, _ = read_members([entry, "other=gspo/Wordle-v0"])
    assert (member.name, member.spec, member.weight) == (name, spec, weight)
    (alone,) = read_members(entry)
    assert (alone.name, alone.spec) == ("", spec)


@pytest.mark.parametrize(
    ("env", "kwargs", "told"),
    [
        ([], {}, "at least one environment"),
        (["a:0", "b"], {}, "'a:0'; expected a weight above 0"),
        (["a:-1", "b"], {}, "'a:-1'; expected a weight above 0"),
        (["gspo/A-v0", "gspo/A-v0:2"], {}, "two environments 'A-v0'; expected different names"),
        (["stop=a", "b"], {}, "the name 'stop'"),
        (["f.py:A", "f.py:B"], {"hops": 3}, "env_kwargs has 'hops'; expected a table for one of"),
        (["f.py:A", "f.py:B"], {"C": {"hops": 3}}, r"--env-kwargs A\.KEY=VALUE"),
    ],
)
def test_a_wrong_mixture_is_one_sentence(env, kwargs, told):
    with pytest.raises(ConfigError, match=told):
        read_members(env, kwargs)


def test_flags_a_file_and_python_name_the_same_mixture(tmp_path):
    flags = ["train", "--env", "gspo/Lookup-v0:0.7", "hard=gspo/Lookup-v0:0.3"]
    flags += ["--env-kwargs", "hard.hops=4", "Lookup-v0.entries=8", "--steps", "3"]
    by_flags = parse(flags).resolved
    text = """
        env = ["gspo/Lookup-v0:0.7", "hard=gspo/Lookup-v0:0.3"]
        steps = 3
        [env_kwargs.hard]
        hops = 4
        [env_kwargs.Lookup-v0]
        entries = 8
    """
    (tmp_path / "run.toml").write_text(text)
    by_file = parse(["train", "--config", str(tmp_path / "run.toml")]).resolved
    by_python = Config.from_recipe(
        env=["gspo/Lookup-v0:0.7", "hard=gspo/Lookup-v0:0.3"],
        env_kwargs={"hard": {"hops": 4}, "Lookup-v0": {"entries": 8}},
        steps=3,
    )
    assert by_flags == by_file == by_python
    assert [dict(m.kwargs) for m in by_flags.environments] == [{"entries": 8}, {"hops": 4}]
    assert from_dict(to_dict(by_flags)) == by_flags
    (tmp_path / "again.toml").write_text(to_toml(by_flags))
    more = ["--config", str(tmp_path / "again.toml"), "--env-kwargs", "hard.hops=2"]
    changed = parse(["train", *more]).resolved
    assert [dict(m.kwargs) for m in changed.environments] == [{"entries": 8}, {"hops": 2}]


@pytest.mark.parametrize("env", ["gspo/Lookup-v0:half", "gspo/Lookup-v0:0.7 gspo/Wordle-v0:0.3"])
def test_what_is_no_weight_behind_an_id_is_named(env):
    with pytest.raises(UnknownEnvironmentError, match="behind 'gspo/Lookup-v0' is not a weight"):
        resolve_env(read_members(env)[0].spec)


def test_one_environment_stays_a_string():
    assert parse(["train", "--env", "gspo/Wordle-v0"]).resolved.env == "gspo/Wordle-v0"
    config = parse(["train", "--env", "gspo/Lookup-v0", "--env-kwargs", "hops=4"]).resolved
    assert config.environments[0].kwargs == {"hops": 4}


def test_a_curriculum_needs_one_environment():
    with pytest.raises(ConfigError, match="curriculum is 'ladder' with several environments"):
        Config.from_recipe(env=("gspo/Lookup-v0", "gspo/Wordle-v0"), curriculum="ladder")


def test_a_moved_file_is_the_same_mixture_and_another_weight_is_not():
    old = ("a.py:A:0.7", "gspo/Lookup-v0:0.3")
    assert moved_only(old, ("there/a.py:A:0.7", "gspo/Lookup-v0:0.3"))
    assert not moved_only(old, ("a.py:A:0.6", "gspo/Lookup-v0:0.3"))
    assert not moved_only(old, ("a.py:B:0.7", "gspo/Lookup-v0:0.3"))
    assert not moved_only(old, "a.py:A")
    assert label(old) == "A+Lookup-v0"


@given(st.dictionaries(st.sampled_from(["x", "y"]), st.integers()), st.integers())
def test_given_arguments_replace_single_ones(old, value):
    env = ("f.py:A", "b.c=f.py:B")
    assert add_kwargs({"A": old, "b.c": {"x": 1}}, {"b.c.y": value}, env) == {
        "A": old,
        "b.c": {"x": 1, "y": value},
    }
    assert add_kwargs(old, {"x": value}, "f.py:A") == {**old, "x": value}
