"""What other settings would do with a kept batch is recorded beside it, and read as data."""

import json
import math
from dataclasses import asdict, replace

import pytest

from gspo_env.errors import OutputError
from gspo_env.runs import Effect, Run
from gspo_env.runs.effects import OWN, write_effects
from gspo_env.runs.page import make_index

EFFECT = Effect(
    norm=0.5,
    cosine=1.0,
    clipped=0.0,
    turned_tokens=0.25,
    turned_turns=0.0,
    best=0.125,
    worst=-0.25,
    outcome=0.0625,
)
UNKNOWN = replace(EFFECT, cosine=math.nan, best=math.nan, worst=math.nan, outcome=math.nan)


@pytest.fixture
def run(tmp_path):
    """The folder of a run that has kept two batches."""
    (tmp_path / "metrics.jsonl").write_text("")
    for step in (2, 10):
        (tmp_path / f"batches/step-{step:06d}").mkdir(parents=True)
    return tmp_path


def test_arms_of_several_calls_are_read_back_by_step_and_the_last_of_a_name_counts(run):
    write_effects(run / "batches/step-000002", {OWN: EFFECT, "loss=grpo": EFFECT})
    write_effects(run / "batches/step-000002", {"loss=cispo": EFFECT, "loss=grpo": UNKNOWN})
    write_effects(run / "batches/step-000010", {OWN: UNKNOWN})
    effects = Run.open(run).effects()
    assert {step: list(arms) for step, arms in effects.items()} == {
        2: [OWN, "loss=grpo", "loss=cispo"],
        10: [OWN],
    }
    assert effects[2]["loss=cispo"] == EFFECT
    assert effects[2]["loss=grpo"].known() == UNKNOWN.known()


def test_the_index_of_the_page_has_what_is_recorded_and_nothing_of_a_run_without(run):
    assert json.loads(make_index(Run.open(run), []))["effects"] == {}
    write_effects(run / "batches/step-000010", {OWN: EFFECT, "</script>": UNKNOWN})
    (arms,) = json.loads(make_index(Run.open(run), []))["effects"].values()
    assert arms == {OWN: asdict(EFFECT), "</script>": UNKNOWN.known()}
    assert arms["</script>"]["cosine"] is None


FORGED = {
    "half": '{"a": {"norm"',
    "a list": "[1, 2]",
    "a text for a number": json.dumps({"a": asdict(EFFECT) | {"norm": "1"}}),
    "a number beyond all": json.dumps({"a": asdict(EFFECT)}).replace("0.5", "1e999"),
    "a field less": json.dumps({"a": {"norm": 1.0}}),
    "a deep one": "[" * 100_000,
    "a large one": " " * (1 << 21),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_damaged_record_is_left_out_with_a_warning_and_the_other_is_shown(case, run, caplog):
    (run / "batches/step-000002/whatif.json").write_text(FORGED[case])
    write_effects(run / "batches/step-000010", {OWN: EFFECT})
    assert list(Run.open(run).effects()) == [10]
    assert "step-000002/whatif.json is damaged and left out" in caplog.text


def test_a_secret_in_the_name_of_an_arm_is_not_recorded(run):
    write_effects(
        run / "batches/step-000002", {"hint=sk-proj-abcdefghijklmnopqrstuvwx1234": EFFECT}
    )
    assert list(Run.open(run).effects()[2]) == ["hint=[redacted]"]


def test_a_record_that_cannot_be_written_is_one_sentence(run):
    (run / "batches/step-000002/whatif.json").mkdir()
    with pytest.raises(OutputError, match="cannot write"):
        write_effects(run / "batches/step-000002", {OWN: EFFECT})
