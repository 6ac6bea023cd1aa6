"""The settings that `stress/pairs.py` combines are those of the tree and of the registry."""

import itertools

import pytest

from gspo_env.registry import BUILTIN
from gspo_env.settings import settings
from gspo_env.training import Curriculum
from stress import pairs


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
