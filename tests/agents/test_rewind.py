"""A kept episode is live again at a turn, is played on in another way, and changes its update."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.runs import talks

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.main import main
from gspo_env.errors import ConfigError, RolloutError

CASES = {
    "plain": {},
    "compacted": {
        "compaction": {"name": "summary", "instruction": "more", "summary_tokens": 8},
        "rollout": {"max_context": 56, "max_turn_tokens": 4},
        "env_kwargs": {"turns": 6},
        "learner": {"lora_rank": 2, "minibatches": 2},
    },
}


@pytest.fixture(scope="module", params=["plain", pytest.param("compacted", marks=pytest.mark.slow)])
def run(request, tmp_path_factory):
    """The folder of a run of two steps that has kept both batches."""
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copy(Path(__file__).parents[1] / "support/talk.py", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        settings = {"steps": 2, "episodes": {"keep_batches": "all"}, **CASES[request.param]}
        recipe = {"imitation_batch": 64}  # a policy that imitates well enough to be credited
        GSPOAgent(config=talks(recipe=recipe, **settings)).train()
        yield folder / "run"


def where(run, kind="action", last=0):
    """The place of an episode with several turns, and one of its turns of a kind."""
    groups = GSPOAgent.replay(run).batch.groups
    return next(
        {"episode": (p, g), "turn": k + 1}
        for p, group in enumerate(groups)
        for g, episode in enumerate(group.episodes)
        for k, turn in enumerate(episode.turns)
        if turn.kind == kind and k > 0 and len(episode.turns) > k + last
    )


def content(episode):
    return [(t.kind, t.observation, t.text, t.reward, t.action_ids) for t in episode.turns]


def test_the_kept_actions_give_the_kept_episode_and_the_kept_update(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    rewind = GSPOAgent.rewind(run, **where(run))
    (again,) = rewind.play(by="kept")
    assert content(again) == content(rewind.kept)
    assert again.engine_logprobs.tolist() == rewind.kept.engine_logprobs.tolist()
    difference = rewind.update(again)
    kept, edited = difference.effects.values()
    assert edited == kept
    assert kept.cosine == pytest.approx(1)
    assert np.array_equal(*difference.advantages)
    assert np.array_equal(*difference.kept_change)
    assert np.array_equal(difference.kept_change[0], difference.edited_change)


def test_a_policy_plays_on_from_the_turn_with_the_weights_of_the_step_or_of_another(
    run, monkeypatch
):
    monkeypatch.chdir(run.parent)
    place = where(run)
    rewind = GSPOAgent.rewind(run, **place)
    past = place["turn"] - 1
    for weights in (None, 2):
        episodes = rewind.play(times=8, weights=weights)
        assert {str(content(e)[:past]) for e in episodes} == {str(content(rewind.kept)[:past])}
        assert len({str(content(e)[past:]) for e in episodes}) > 1
        versions = {turn.weights_version for e in episodes for turn in e.turns[past:]}
        assert versions == {1 if weights is None else weights}
    with pytest.raises(ConfigError, match="weights is 7, and the run has those after 0, 1, 2"):
        rewind.play(weights=7)


def test_an_engine_that_takes_the_adapter_alone_gets_that_of_the_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    support = Path(__file__).parents[1] / "support"
    shutil.copy(support / "talk.py", tmp_path)
    settings = {"learner": {"lora_rank": 2}, "episodes": {"keep_batches": "all"}}
    engine = {"engine": f"{support / 'adapter_engine.py'}:AdapterOnly"}
    GSPOAgent(config=talks(steps=1, **settings, **engine)).train()
    rewind = GSPOAgent.rewind("run", **where("run"))
    (again,) = rewind.play(by="kept")
    assert content(again) == content(rewind.kept)


def test_another_action_result_and_reward_reach_the_policy_and_the_update(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    place = where(run, last=1)
    turn = place["turn"] - 1
    rewind = GSPOAgent.rewind(run, **place)
    changes = {"action": "yes", "result": "no", "reward": 9.0}
    (episode,) = rewind.play(**changes, by="expert")
    assert (episode.turns[turn].text, episode.turns[turn].reward) == ("yes", 9.0)
    later = [t for t in episode.turns[turn + 1 :] if t.kind == "action"]
    assert later[0].observation == "no"
    assert {t.text for t in later} <= {"yes", "no", "maybe so"}
    assert rewind.batch.chat.decode(later[0].prompt_ids).find("no") >= 0
    difference = rewind.update(episode)
    assert difference.effects["edited"].cosine < 0.999
    assert difference.advantages[1][turn] > difference.advantages[0][turn]
    assert len(difference.edited_change) == len(episode.turns)
    turns = list(episode.turns)
    turns[turn] = replace(turns[turn], reward=-9.0)
    punished = rewind.update(replace(episode, turns=tuple(turns)))
    assert punished.edited_change[turn] < difference.edited_change[turn]


PROGRAM = """
import json
import urllib.request


def talk(task, base_url, api_key):
    messages = [{"role": "user", "content": task["question"]}]
    for n in range(3):
        body = json.dumps({"messages": messages}).encode()
        head = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(base_url + "/chat/completions", body, head)
        with urllib.request.urlopen(request) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": f"own {n}"})
        messages = messages[-4:] if task["forgets"] else messages
    return len(said) % 5 / 4
"""


@pytest.mark.parametrize("forgets", [False, True])
def test_a_result_is_edited_where_an_environment_answers_with_whole_conversations(
    forgets, tmp_path, in_folder
):
    (tmp_path / "program.py").write_text(PROGRAM)
    rows = [{"question": f"say {n}", "forgets": forgets} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kwargs = {"program": "program.py:talk", "data": "rows.jsonl"}
    settings = {"steps": 1, "eval_every": 0, "eval_tasks": 2, "episodes": {"keep_batches": "all"}}
    settings |= {"rollout": {"group_size": 2, "max_turn_tokens": 4}, "tasks_per_step": 2}
    GSPOAgent(config=talks(env="gspo/Program-v0", env_kwargs=kwargs, **settings)).train()
    groups = GSPOAgent.replay("run").batch.groups
    place = next(
        (p, g)
        for p, group in enumerate(groups)
        for g, e in enumerate(group.episodes)
        if len(e.turns) == 3
    )
    rewind = GSPOAgent.rewind("run", episode=place, turn=1)
    (episode,) = rewind.play(result="edited", by="kept")
    prompts = [conversation(rewind, episode, k) for k in range(3)]
    assert "edited" in prompts[1]
    assert "own 0" not in prompts[1] + prompts[2]
    assert "edited" in prompts[2]
    assert "own 1" in prompts[2]
    assert episode.turns[1].observation == "edited"
    assert rewind.update(episode).effects["edited"].norm >= 0


def conversation(rewind, episode, k):
    """All that the policy has read before its turn k."""
    ids, turn = [], episode.turns[k]
    while turn is not None:
        ids = [*turn.prompt_ids, *turn.action_ids, *ids]
        turn = episode.turns[turn.parent] if turn.parent is not None else None
    return rewind.batch.chat.decode(ids)


def test_an_environment_that_does_not_repeat_is_refused_with_the_reason(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    rewind = GSPOAgent.rewind(run, **where(run))
    talk = run.parent / "talk.py"
    text = talk.read_text()
    try:
        for old, new, reason in (
            ('return f"{self.lead}say', 'return f"tell', "at turn 1 its observation is 'tell"),
            ("% 5 / 4", "% 5 / 3 + 1", "at turn 2 its reward is "),
            ("self.turn == self.turns", "True", "it has ended"),
        ):
            talk.write_text(text.replace(old, new))
            with pytest.raises(RolloutError, match=f"does not repeat the kept episode: .*{reason}"):
                rewind.play()
    finally:
        talk.write_text(text)


def shown(monkeypatch, capsys, typed, *arguments):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    main(["rewind", *map(str, arguments)])
    return capsys.readouterr().out


def test_the_command_shows_the_distribution_and_what_the_update_does(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    (p, g), turn = where(run).values()
    flags = (run, "--episode", f"train-2-{p}-{g}", "--turn", turn)
    output = shown(monkeypatch, capsys, "", *flags, "--times", 4)
    for line in ("kept      outcome", "outcome   ", "success   ", "outcomes  "):
        assert f"\n{line}" in output
    assert "| as kept | " in output
    output = shown(monkeypatch, capsys, "yes\n/go\n", *flags, "--by", "hand")
    assert "Press Enter to let the model act" in output
    assert "yes" in output
    assert "\nmodel: " in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--episode 9-0", "there is no episode 9-0 in the batch of step 2; expected a group from"),
        ("--episode x", "episode is 'x'; expected its group and number"),
        ("--turn 9", "turn is 9; expected one from 1 to"),
        ("--by hand --times 2", "times is 2, and you play by hand; expected 1"),
        ("--step 7", "has not kept the batch of step 7; expected one of 1, 2"),
    ],
)
def test_what_there_is_not_is_refused_in_one_sentence(run, flags, message, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    with pytest.raises(SystemExit):
        main(["rewind", str(run), *flags.split()])
    assert message in capsys.readouterr().err


def test_a_summary_cannot_be_edited(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    if run.parent.name.startswith("compacted"):
        rewind = GSPOAgent.rewind(run, **where(run, kind="summary"))
        with pytest.raises(ConfigError, match="is a summary, which the environment does not see"):
            rewind.play(reward=1.0)
        (again,) = rewind.play(by="kept")
        assert content(again) == content(rewind.kept)
