"""Kept episodes: what is in the files, that it is exact, and that nothing damages them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs import tiny
from support.turns import episode, turn

from gspo_agents.gspo import GSPOAgent
from gspo_agents.traces import traces
from gspo_env.batch.sample import to_samples
from gspo_env.config import EpisodesConfig
from gspo_env.episodes import read_episodes, render_episode
from gspo_env.episodes.records import Episodes
from gspo_env.episodes.schema import EpisodeFile, episode_files
from gspo_env.episodes.writer import EpisodeLog, surplus, to_table
from gspo_env.errors import OutputError
from gspo_env.learner import GSPO, Learner, LearnerConfig, TokenValues
from gspo_env.rollout.metrics import Evaluation
from gspo_env.types import Group, Message, Prompt, StepInfo, StopReason, Task, ToolCall

ROOT = Path(__file__).parents[2]


def small(output, **changes):
    settings = {
        **{"recipe": {"imitation_steps": 4}, "rollout": {"group_size": 3}},
        **{"learner": {"minibatches": 2}, "checkpoints": {"save_every": 1}},
        **{"tasks_per_step": 3, "eval_every": 1, "output": str(output)},
    }
    return tiny(**{**settings, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept") / "run"
    GSPOAgent(config=small(folder)).train()
    return folder


def kept(*played, tokens=None):
    group = Group(task=played[0].task, episodes=played)
    return Episodes(to_table(3, "train", {5: group}, tokens or {}), {})


def test_a_run_keeps_every_evaluation_and_a_sample_of_training_groups(run):
    found = read_episodes(run)
    counts: dict[tuple[str, int], int] = {}
    for record in found:
        counts[record.phase, record.step] = counts.get((record.phase, record.step), 0) + 1
    evaluations = {(phase, step): 4 for phase in ("eval", "greedy") for step in (0, 1, 2)}
    assert counts == {**evaluations, ("train", 1): 6, ("train", 2): 6}
    assert len({record.episode for record in found}) == len(found)
    for record in found:
        assert [t.turn for t in record.turns] == list(range(record.num_turns))
        assert record.total_reward == sum(t.reward for t in record.turns)
    assert len(read_episodes(run, phases=["train"], steps=[2])) == 6
    assert len(read_episodes(run, phases="train", steps=[2])) == 6
    with pytest.raises(OutputError, match=r"phases has \['training'\]; expected some of train"):
        read_episodes(run, phases="training")


def test_kept_tokens_have_the_log_probabilities_of_engine_and_trainer(run):
    trained = [e for e in read_episodes(run, phases=["train"]) if e.trained]
    assert trained
    for record in trained:
        for t in record.turns:
            assert len(t.action_ids) == len(t.engine_logprobs) == len(t.trainer_logprobs)
            assert t.trainer_logprobs == pytest.approx(t.engine_logprobs, abs=2e-3)
            assert len(set(t.advantages)) == 1  # an advantage of the turn
            assert len(set(t.ratios)) == 1  # GSPO
            assert t.weights_version == record.step - 1


def test_the_text_of_kept_tokens_is_that_of_the_conversation(run):
    found = read_episodes(run)
    ids = {i for e in found for t in e.turns for i in (*t.prompt_ids, *t.action_ids)}
    assert ids == set(found.tokens)
    for record in found:
        for t in record.turns:
            if any(found.tokens[i].startswith("<0x") for i in t.action_ids):
                continue  # a byte, which is not a text alone
            said = "".join(found.tokens[i] for i in t.action_ids)
            assert said.removesuffix("<|im_end|>") == t.action


def test_a_resumed_run_has_no_episode_twice_and_the_same_ones(run, tmp_path):
    half = tmp_path / "half"
    GSPOAgent(config=small(half)).train()
    # as if the process had been killed in the second step
    shutil.rmtree(half / "checkpoints" / "step-000002")
    (half / "episodes" / "000002-eval.parquet").unlink()
    (half / "episodes" / ".000002-eval.parquet.part").write_bytes(b"PAR1")
    (half / "episodes" / "000009-train.parquet").write_bytes(
        (half / "episodes" / "000001-train.parquet").read_bytes()
    )
    GSPOAgent.resume(half).train()
    whole, again = read_episodes(run), read_episodes(half)
    assert [e.episode for e in again] == [e.episode for e in whole]
    for one, other in zip(again, whole, strict=True):
        assert [t.action_ids for t in one.turns] == [t.action_ids for t in other.turns]
        assert [t.ratios for t in one.turns] == [t.ratios for t in other.turns]


def test_a_damaged_file_is_named_and_the_others_are_read(run, tmp_path, caplog):
    folder = tmp_path / "episodes"
    folder.mkdir()
    for file in episode_files(run):
        data = file.path.read_bytes()
        cut = file.step == 1 and file.phase == "train"
        (folder / file.path.name).write_bytes(data[: len(data) // 2] if cut else data)
    assert {(e.phase, e.step) for e in read_episodes(tmp_path)} >= {("train", 2), ("eval", 0)}
    assert "000001-train.parquet is damaged" in caplog.text


def test_an_action_that_several_versions_of_the_weights_sampled_keeps_that_of_each_token():
    known = {"action_ids": (4, 5, 6), "logprobs": (-0.5, -1.5, -1.0), "weights_version": 3}
    both = turn(**known, weights_versions=((3, 1), (4, 2)))
    played = episode(turn(**known), both)
    (record,) = kept(played)
    assert [t.token_versions for t in record.turns] == [None, (3, 4, 4)]
    (trace,) = traces(4, "train", {0: Group(task=played.task, episodes=(played,))}, most=1)
    facts = [span.attributes for span in trace.spans if span.kind == "turn"]
    assert [fact.get("weights_versions") for fact in facts] == [None, [[3, 1], [4, 2]]]


@pytest.mark.parametrize(("keep", "phases"), [("none", set()), ("eval", {"eval", "greedy"})])
def test_the_setting_chooses_what_is_kept(tmp_path, keep, phases):
    config = small(tmp_path / "run", steps=1, episodes={"keep_episodes": keep})
    GSPOAgent(config=config).train()
    assert {file.phase for file in episode_files(tmp_path / "run")} == phases
    if not phases:
        with pytest.raises(OutputError, match="--keep-episodes none"):
            read_episodes(tmp_path / "run")


@given(st.data())
def test_the_sequence_of_each_turn_is_the_one_that_trains_it(data):
    parents = [
        data.draw(st.none() | st.integers(0, k - 1)) if k else None
        for k in range(data.draw(st.integers(1, 8)))
    ]
    played = episode(*(turn(parent=parent) for parent in parents))
    (record,) = kept(played)
    for number, sequence in enumerate(played.sequences):
        trained = {k for k in sequence.turn_ids.tolist() if k >= 0}
        assert {t.turn for t in record.turns if t.sequence == number} == trained


def test_tokens_that_are_not_trained_on_have_no_value_of_the_trainer():
    masked = turn(info=StepInfo(token_mask=(False, True)))
    values = TokenValues(advantage=np.array([2.0]), ratio=np.array([1.5]), clipped=np.array([1.0]))
    (record,) = kept(episode(masked), tokens={(5, 0, 0): values})
    (t,) = record.turns
    assert (t.advantages, t.ratios, t.clipped) == ((None, 2.0), (None, 1.5), (None, True))
    assert t.trainer_logprobs is None
    assert t.engine_logprobs == (-0.5, -1.5)


def test_the_learner_returns_the_values_of_the_chosen_episodes_by_turn(model):
    rng = np.random.default_rng(0)
    played = [
        episode(
            *(
                turn(
                    parent=parent,
                    prompt_ids=tuple(rng.integers(3, 60, 5).tolist()),
                    action_ids=tuple(rng.integers(3, 60, 3).tolist()),
                    logprobs=(-4.0,) * 3,
                    info=StepInfo(token_mask=(True, False, True) if parent == 0 else None),
                )
                for parent in parents
            )
        )
        for parents in ([None, 0, 1], [None, 0, 0], [None, None])
    ]
    advantages = [rng.standard_normal(len(e.turns)) for e in played]
    samples = to_samples(played, advantages)
    settings = LearnerConfig(minibatches=2, warmup_steps=0, microbatch_tokens=16)
    learner = Learner(model.double(), GSPO(), settings, total_steps=2)
    alone = [learner.logprobs(learner.pack([sample])).tolist() for sample in samples]
    expected: dict[tuple[int, int], list[float]] = {}
    for sample, logprobs in zip(samples, alone, strict=True):
        for k, value in zip(sample.turn_ids[sample.turn_ids >= 0], logprobs, strict=True):
            expected.setdefault((sample.episode or 0, int(k)), []).append(value)
    learner.update(samples, keep=[0, 1, 2])
    assert learner.tokens.keys() == expected.keys()
    for (n, k), values in learner.tokens.items():
        assert values.trainer_logprobs == pytest.approx(expected[n, k], abs=1e-6)
        assert values.advantage == pytest.approx([advantages[n][k]] * len(expected[n, k]))
        assert len(values.ratio) == len(values.clipped) == len(expected[n, k])
    learner.update(samples, keep=[1])
    assert {n for n, _ in learner.tokens} == {1}
    learner.update(samples)
    assert learner.tokens == {}


def test_a_text_that_looks_like_a_secret_is_replaced_and_its_tokens_are_left_out():
    secret = "sk-" + "a1" * 20
    leaked = episode(turn(), turn(text=f"the key is {secret}"), final_observation="ok")
    (record,) = kept(leaked)
    assert record.redacted
    assert secret not in str(record)
    assert [t.action_ids for t in record.turns] == [(), ()]
    assert not kept(episode(turn()))[0].redacted


def test_lone_surrogates_and_control_characters_are_written_and_read():
    text = "half \ud83d of a pair \x00 \u202e </script><script>"
    (record,) = kept(episode(turn(text=text, observation=text), final_observation=text))
    assert record.turns[0].action == text.encode(errors="backslashreplace").decode()
    assert "</script>" in record.final_observation


def test_an_episode_without_turns_is_kept_with_its_prompt():
    lost = episode(prompt=Prompt(system="Be brief."), reason=StopReason.ERROR, error="it broke")
    first, second = kept(lost, episode(turn()))
    assert (first.turns, first.num_turns, first.error) == ((), 0, "it broke")
    assert second.num_turns == 1


def test_tool_calls_and_malformed_ones_are_columns():
    text = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><tool_call>{</tool_call>'
    (record,) = kept(episode(turn(text=text)))
    good, bad = json.loads(record.turns[0].tool_calls or "")
    assert good == {"name": "f", "arguments": {"x": 1}}
    assert "not valid JSON" in bad["error"]


def test_calls_that_only_the_response_template_reads_are_columns_too():
    said = Message(
        role="assistant", content="", tool_calls=(ToolCall(name="f", arguments={"x": 1}),)
    )
    (record,) = kept(episode(turn(text="@f x=1", message=said)))
    assert json.loads(record.turns[0].tool_calls) == [{"name": "f", "arguments": {"x": 1}}]


@given(
    st.lists(
        st.tuples(st.integers(0, 99), st.sampled_from(["train", "eval", "greedy"])), unique=True
    ),
    st.integers(1, 9000),
)
def test_too_many_bytes_thin_out_training_first_and_leave_first_and_last(places, most):
    files = [
        EpisodeFile(path=Path(f"{step}-{phase}"), step=step, phase=phase, size=100)
        for step, phase in sorted(places)
    ]
    gone = surplus(files, most)
    left = [file for file in files if file not in gone]
    for phase in ("train", "greedy", "eval"):
        before = [f.step for f in files if f.phase == phase]
        after = [f.step for f in left if f.phase == phase]
        assert after[:1] + after[-1:] == before[:1] + before[-1:]
        if sum(f.size for f in left) > most:
            assert len(after) <= 2
    if any(f.phase == "eval" for f in gone):
        assert sum(f.phase == "train" for f in left) <= 2


def test_a_run_never_has_more_megabytes_than_its_setting(tmp_path):
    def attempt(what, write):
        write()
        return True

    class Letters:
        def decode(self, ids):
            return hex(ids[0])

        def convert_ids_to_tokens(self, number):
            return hex(number)

    log = EpisodeLog(tmp_path, EpisodesConfig(keep_episodes="all", keep_mb=1), Letters(), attempt)
    rng = np.random.default_rng(0)
    for step in range(12):
        noise = tuple(rng.integers(0, 50_000, 40_000).tolist())
        long = episode(turn(prompt_ids=noise))
        log.trained(step, {0: Group(task=long.task, episodes=(long,))}, {})
    files = episode_files(tmp_path)
    assert sum(file.size for file in files) <= 10**6
    assert (files[0].step, files[-1].step) == (0, 11)
    assert len(files) > 4


def test_a_full_disk_stops_no_training(tmp_path):
    failed = []

    def attempt(what, write):
        try:
            write()
        except OSError:
            failed.append(what)
        return not failed

    (tmp_path / "episodes").write_text("a file is in the way")
    log = EpisodeLog(tmp_path, EpisodesConfig(), None, attempt)
    one = episode(turn())
    group = Group(task=one.task, episodes=(one,))
    log.evaluated(0, Evaluation([group], [group], 1.0))
    assert failed == ["episodes/000000-eval.parquet", "episodes/000000-greedy.parquet"]


def make_episode(**changes):
    played = turn(text="guess 7", observation="Guess a number.\n\nBe quick.")
    fields = {"task": Task(env_id="gspo/Guess-v0", seed=11, options={"high": 9}), **changes}
    return episode(*fields.pop("turns", (played,)), **fields)


def test_an_episode_shows_task_prompt_turns_and_how_it_ended():
    prompt = Prompt(system="Be quick.", messages=(Message(role="user", content="hello"),))
    text = render_episode(make_episode(prompt=prompt, final_observation="Right!"))
    for part in (
        *("gspo/Guess-v0, seed 11, high=9", "turn 1: reward +0.5, 3 tokens read, 2 sampled"),
        *("  | Guess a number.\n  | \n  | Be quick.", "  | guess 7", "  | Right!"),
        *("system prompt:\n  | Be quick.", "earlier user message:\n  | hello"),
        "success: outcome +1, stopped by terminated",
    ):
        assert part in text


def test_an_episode_that_was_cut_is_no_failure_and_one_that_broke_shows_its_error():
    text = render_episode(make_episode(success=False, reason=StopReason.MAX_TURNS))
    assert "no success: outcome +1, stopped by max_turns" in text
    broken = {"reason": StopReason.ERROR, "error": "boom"}
    text = render_episode(make_episode(turns=(), **broken))
    for part in ("its environment failed", "stopped by error", "  | boom"):
        assert part in text
