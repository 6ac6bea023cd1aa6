"""The settings that `stress/pairs.py` combines are those of the tree and of the registry."""

import itertools
import subprocess
import sys

import pytest

from gspo_env.registry import BUILTIN, load_module, name_of
from gspo_env.rewards.judge import ask_about
from gspo_env.settings import settings
from gspo_env.tracking.base import flatten
from gspo_env.training import Curriculum
from gspo_env.types import Message
from stress import pairs
from stress.pairs_sets import Rows

pytestmark = pytest.mark.usefixtures("in_folder")  # a judge opens its cache


@settings
class Named(Curriculum):
    word: str
    """It needs an argument."""


@settings
class Plain(Curriculum):
    often: bool = False
    """It needs none."""


def test_every_setting_and_every_choice_is_combined_or_listed():
    assert pairs.unlisted() == []


def test_a_new_choice_is_combined_by_itself_and_one_that_needs_arguments_has_to_be_listed(
    monkeypatch,
):
    monkeypatch.setitem(BUILTIN["curriculum"], "plain", f"{__name__}:Plain")
    assert pairs.unlisted() == []
    assert ("plain", {}) in pairs.domains()["curriculum"]
    assert pairs.domains()["curriculum.often"] == [False, True]
    monkeypatch.setitem(BUILTIN["curriculum"], "named", f"{__name__}:Named")
    assert pairs.unlisted() == ["curriculum.word", "curriculum named"]


def test_a_setting_that_is_listed_and_gone_or_that_only_a_set_should_have_and_lacks_is_named(
    monkeypatch,
):
    constant = {**pairs.CONSTANT, "a reason": "learner.gone supply.lost"}
    monkeypatch.setattr(pairs, "CONSTANT", constant)
    monkeypatch.setitem(pairs.SETS, "vllm", Rows({}, ("vllm",)))
    expected = ["learner.gone", "supply.lost", "engine.undo_updates", "engine.sync_tolerance"]
    assert pairs.unlisted() == [*expected, "engine.follow_cache", "engine.replicas"]


@pytest.mark.parametrize("name", pairs.SETS)
def test_the_rows_of_a_set_are_settings_of_which_all_are_taken(name):
    for row in pairs.SETS[name].rows.values():
        config = pairs.config(pairs.usual_row() | row)
        values = flatten(config)
        assert all(values[path] == value for path, value in row.items() if "." in path)
        engine, settings = row.get("engine", ("transformers", {}))
        assert name_of("engine", config.engine) == engine
        assert all(values[f"engine.{key}"] == value for key, value in settings.items())


def test_a_setting_that_does_nothing_alone_is_unusual_only_with_the_one_that_it_needs():
    values = pairs.domains()
    bans = [ban for ban in pairs.ownership() if "learner.lora_alpha" in ban]
    assert bans == [
        {"learner.lora_rank": [0], "learner.lora_alpha": values["learner.lora_alpha"][1:]}
    ]


BLOCKED = """
import sys
rooms = ["gspo_env.credit", "gspo_env.batch", "gspo_env.learner"]
sys.modules.update(dict.fromkeys(rooms))
sys.path.insert(0, {stress!r})
from pairs_oracle import Credit, Run, compare, environment, objective, ratios, read_episodes
from gspo_env import make_env
for env in (make_env("gspo/Lookup-v0"), environment(type("Record", (), {{"env": "Words"}}))):
    env.reset(seed=1)
    env.step("amber")
for room in rooms:
    try:
        __import__(room)
    except ImportError:
        print("blocked")
"""


def test_the_reference_works_without_the_rooms_that_it_checks():
    program = BLOCKED.format(stress=str(pairs.HERE))
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["blocked"] * 3


def test_the_judge_rates_the_last_message_of_each_answer_by_its_letters():
    opening = [Message(role="user", content="(assistant:)")]
    texts = ("abc", "a b\ncd", "xyz")
    answers = [[*opening, Message(role="assistant", content=text)] for text in texts]
    judge = load_module(str(pairs.HERE / "pairs_judges.py"))
    assert judge.answer(ask_about([opening, answers[1]], "Good.", 1, 24_000)) == "4"
    question = ask_about([opening, *answers], "Good.", 1, 24_000)
    assert judge.answer(question) == "2>1=3"


def test_rows_have_every_pair_that_is_not_refused_and_what_a_choice_lacks_stays_usual(monkeypatch):
    values = {
        "loss": [("gspo", {}), ("grpo", {}), ("sapo", {})],
        "loss.kl_coef": [0.0, 0.05],
        "threads": [1, 2],
        "rollout.group_size": [4, 2, 1],
    }
    monkeypatch.setattr(pairs, "domains_cache", lambda: values)
    refused = [{"threads": [2], "rollout.group_size": [2, 1]}]
    done = [dict(zip(values, (("sapo", {}), 0.0, 1, 4), strict=True))]
    rows, without = pairs.covering(2, 0, refused, done)
    for (n, first), (m, second) in itertools.combinations(values.items(), 2):
        for v, w in itertools.product(first, second):
            in_rows = any(row[n] == v and row[m] == w for row in [*rows, *done])
            lacks = (v, w) == (("sapo", {}), 0.05)
            banned = (v, w) in ((2, 2), (2, 1)) and m == "rollout.group_size"
            assert in_rows != (lacks or banned)
            assert any(row.get(n) == v and row.get(m) == w for row in without) == (lacks or banned)
    assert pairs.covering(2, 0, refused, [*done, *rows])[0] == []


def test_the_table_of_what_is_refused_reads_back():
    refused = pairs.read_matrix()
    assert len(refused) > 4
    assert pairs.matrix(refused) in (pairs.HERE.parent / "docs/reference.md").read_text()
    assert all(pairs.is_clear(*each) for each in refused)


@pytest.mark.parametrize(
    ("sentence", "clear"),
    [
        ("loss.kl_coef is 0.05 with threads 2; expected 1", True),
        ("loss.kl_coef is 0.05; expected 0", False),
        ("loss.kl_coef is 0.05 with threads 2", False),
        ("loss.kl_coef is 0.05 of 'GSPO' with threads 2; expected 1", False),
    ],
)
def test_a_sentence_names_two_of_the_settings_and_what_to_change(sentence, clear):
    ban = {"loss.kl_coef": [0.05], "threads": [2], "env": ["Words"]}
    assert pairs.is_clear(ban, sentence) == clear
