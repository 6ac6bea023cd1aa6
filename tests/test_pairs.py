"""The settings that `stress/pairs.py` combines are those of the tree and of the registry."""

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
