"""Settings: Python, TOML and flags agree, and errors name the wrong field."""

import dataclasses
import re
from pathlib import Path

import pytest
from support.cli_errors import refused

from gspo_env.config import Config, from_dict, load_toml, resolve, to_dict, to_toml
from gspo_env.credit import GroupGAE, ReturnsToGo
from gspo_env.errors import ConfigError
from gspo_env.registry import name_of
from gspo_env.renamed import REMOVED
from gspo_env.tracking.base import flatten


def test_toml_gives_back_the_same_tree(tmp_path):
    config = Config(
        env="gspo/Calculator-v0", env_kwargs={"operations": [2, 3], "note": 'a "b"\n'}, steps=7
    )
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load_toml(path) == config
    chosen = from_dict({"advantage": {"name": "group_gae", "lam": 0.5}, "loss": "grpo"})
    path.write_text(to_toml(chosen))
    assert load_toml(path) == chosen
    assert chosen.advantage == GroupGAE(lam=0.5)


def test_what_a_file_leaves_out_is_neutral_with_a_model_and_the_tiny_recipes_without():
    given = from_dict({"model": "some/model", "learner": {"minibatches": 2}})
    assert given.loss.clip_low == 3e-4
    assert given.learner.minibatches == 2
    assert given.learner.learning_rate == Config().learner.learning_rate < 1e-5
    tiny = from_dict({})
    assert tiny == Config.from_recipe("tiny")
    assert tiny.loss.clip_low == 0.03
    assert Config.from_recipe("tiny", loss={"clip_low": 0.1}).loss.clip_low == 0.1
    assert from_dict({"recipe": {"layers": 3}}).recipe.layers == 3
    assert Config.from_recipe("tiny", recipe={"layers": 3}).recipe.layers == 3


def test_another_choice_starts_from_its_own_defaults_and_the_same_one_keeps_its_settings():
    grpo = from_dict({"loss": "grpo"}).loss
    assert (grpo.ratio_level, grpo.clip_low) == ("token", 0.2)
    assert from_dict({"loss": {"name": "gspo"}}).loss.clip_low == 0.03


def test_a_users_class_is_a_choice_by_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from gspo_env.credit import Estimator\n"
        "@dataclass(frozen=True)\n"
        "class Own(Estimator):\n"
        "    weight: float = 1.0\n"
        "    def advantages(self, group): ...\n"
        "@dataclass(frozen=True)\n"
        "class Needy(Estimator):\n"
        "    weight: float\n"
        "    def advantages(self, group): ...\n"
        "class Plain: ...\n"
        "@dataclass(frozen=True)\n"
        "class Raises(Estimator):\n"
        "    def __post_init__(self): raise RuntimeError('boom')\n"
        "    def advantages(self, group): ...\n"
        "@dataclass(frozen=True)\n"
        "class Idle: ...\n"
    )
    config = from_dict({"advantage": {"name": f"{file}:Own", "weight": 2}})
    assert config.advantage.weight == 2.0
    assert to_dict(config)["advantage"] == {"name": f"{file}:Own", "weight": 2.0}
    assert from_dict(to_dict(config)) == config
    with pytest.raises(ConfigError, match=r"Needy' cannot be made with its defaults: TypeError"):
        from_dict({"advantage": f"{file}:Needy"})
    with pytest.raises(ConfigError, match=r"Raises' cannot be made with its defaults: .*boom"):
        from_dict({"advantage": f"{file}:Raises"})
    with pytest.raises(ConfigError, match=r"expected a subclass of gspo_env\.credit\.Estimator"):
        from_dict({"advantage": f"{file}:Idle"})
    with pytest.raises(ConfigError, match="expected the name of a dataclass"):
        from_dict({"advantage": f"{file}:Plain"})
    with pytest.raises(ConfigError, match=r"did you mean returns_to_go"):
        from_dict({"advantage": "return_to_go"})


def test_a_users_settings_may_have_any_type_that_toml_can_say(tmp_path):
    file = tmp_path / "odd.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from pathlib import Path\n"
        "from gspo_env.credit import Estimator\n"
        "@dataclass(frozen=True)\n"
        "class Odd(Estimator):\n"
        "    levels: tuple[int, ...] = ()\n"
        "    where: Path = Path('here')\n"
        "    maybe: float | None = None\n"
        "    def advantages(self, group): ...\n"
    )
    table = {"name": f"{file}:Odd", "levels": [1, 2], "where": "there", "maybe": 3}
    for tree in ({"advantage": table}, {"advantage": f"{file}:Odd"}):
        config = from_dict(tree)
        (tmp_path / "c.toml").write_text(to_toml(config))
        assert load_toml(tmp_path / "c.toml") == config
    assert from_dict({"advantage": table}).advantage.where == Path("there")
    with pytest.raises(ConfigError, match=r"levels is 'x'; expected a valid"):
        from_dict({"advantage": {"name": f"{file}:Odd", "levels": "x"}})


def test_a_setting_is_found_by_path_or_last_part_and_one_of_another_choice_is_explained():
    assert resolve(Config(), "clip_low") == "loss.clip_low"
    assert resolve(Config(), "advantage.gamma") == "advantage.gamma"
    with pytest.raises(ConfigError, match=r"'lam': it is a setting of group_gae.*'returns_to_go'"):
        resolve(Config(), "lam")
    with pytest.raises(ConfigError, match=r"'stepz'; perhaps you mean steps"):
        resolve(Config(), "stepz")
    assert Config().advantage == ReturnsToGo()


def test_python_takes_the_names_of_flags_and_dictionaries_as_sections():
    config = Config.from_recipe(
        "imitate", lora_rank=8, conversations="x", loss="grpo", clip_low=0.1
    )
    assert (config.learner.lora_rank, config.recipe.conversations) == (8, "x")
    assert (name_of("loss", config.loss), config.loss.clip_low) == ("grpo", 0.1)
    plain = Config(learner={"lora_rank": 8}, loss={"name": "grpo", "clip_low": 0.1}, engine="vllm")
    assert plain.learner == config.learner
    assert (plain.loss, name_of("engine", plain.engine)) == (config.loss, "vllm")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Config.from_recipe(lora_rnk=8), "'lora_rnk'; perhaps you mean learner.lora_rank"),
        (lambda: Config(learner={"lora_rnk": 8}), "unknown field learner.'lora_rnk'"),
        (lambda: Config(rollout={"group_size": "8"}), "rollout.group_size is '8'; expected"),
        (lambda: Config(rollout=8), "rollout is 8; expected a table"),
    ],
)
def test_python_refuses_a_setting_by_name(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepz = 3", "unknown field 'stepz'; expected one of: steps"),
        ("[learner]\nlearning_rates = 1", "unknown field learner.'learning_rates'.*learning_rate"),
        (
            "learning_rate = 1e-5",
            r"unknown field 'learning_rate'; did you mean learner.learning_rate\?",
        ),
        ("[learner]\nmax_turns = 3", r"learner.'max_turns'; did you mean rollout.max_turns\?"),
        ("[rollout]\ngroup_sizes = 3", "rollout.'group_sizes'; expected one of: group_size"),
        ("[rollout]\nsteps = 3", r"rollout.'steps'; did you mean steps\?"),
        ("steps = -1", "steps is -1; expected a number greater than or equal to 0"),
        ("seed = 1e3", "seed is 1000.0; expected a valid integer"),
        ("engine = 'magic'", "engine is 'magic'; expected one of: transformers, vllm"),
        ("learner = 3", "learner is 3; expected a table"),
        ("[rollout]\nmax_turn_tokens = 512", "max_turn_tokens is 512; expected less"),
        ("steps = ", "not valid TOML"),
        ("[advantage]\nlam = 0.9", "advantage.'lam': it is a setting of group_gae, and adv"),
        ("[supply]\nmax_resamples = 1\nmin_success = 0.9\nmax_success = 0.1", "min_success is 0.9"),
        ("[supply]\nmax_success = 0.9", "max_resamples 0, so they have no effect"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(tmp_path, text, words):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_toml(path)


@pytest.mark.parametrize("name", [name for name in REMOVED if "called" not in REMOVED[name]])
def test_what_is_gone_names_what_serves_instead(capsys, name):
    section, _, last = name.rpartition(".")
    if section == "command":
        assert REMOVED[name] in refused(capsys, last)
        return
    assert REMOVED[name] in refused(capsys, "train", f"--{name.replace('_', '-')}", "1")
    with pytest.raises(ConfigError, match=re.escape(REMOVED[name])):
        from_dict({section: {last: 1}} if section else {name: 1})


def test_an_argument_that_toml_cannot_hold_is_named():
    with pytest.raises(ConfigError, match=r"env_kwargs.c.x is \[1, None\]; expected a list"):
        to_toml(Config(env_kwargs={"c": {"x": [1, None]}}))
    assert "gone" not in to_toml(Config(env_kwargs={"gone": None}))


def test_parameters_are_flat_and_complete():
    flat = flatten(Config(), mappings=False)
    assert flat["learner.learning_rate"] == 1e-6
    leaves = sum(
        len(dataclasses.fields(v)) if dataclasses.is_dataclass(v) else 1
        for v in (getattr(Config(), f.name) for f in dataclasses.fields(Config))
    )
    assert len(flat) == leaves
