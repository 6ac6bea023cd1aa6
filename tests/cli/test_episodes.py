"""`gspo-env episodes` writes what `--recipe imitate` reads."""

import json

import pytest
from support.runs import tiny

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.main import main
from gspo_env.episodes import read_episodes
from gspo_env.recipes.conversations import read_conversations


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with tools, which has kept all episodes."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    episodes = {"keep_episodes": "all"}
    GSPOAgent(config=tiny(steps=1, episodes=episodes, output=str(folder))).train()
    return folder


def test_what_it_writes_is_read_back_by_the_recipe(run, tmp_path, capsys):
    records = [*read_episodes(run)]
    held_out = {r.task_key for r in records if r.phase != "train"}
    played = [r for r in records if r.phase == "train" and r.task_key not in held_out]
    main(["episodes", str(run), "--format", "messages", "--out", str(tmp_path / "all.jsonl")])
    assert f"episodes       {len(played)} of {len(played)}" in capsys.readouterr().out
    read = read_conversations(str(tmp_path / "all.jsonl"))
    speaking = [r for r in played if any(t.action for t in r.turns)]
    assert len(read) == len({(*(t.action for t in r.turns), r.seed) for r in speaking})
    assert {c.task_key for c in read} == {r.task_key for r in speaking}
    by_key = {}
    for r in played:
        by_key.setdefault(r.task_key, []).append(r)
    for each in read:
        assert each.messages[-1].role == "assistant"
        spoken = [m.content for m in each.messages if m.role != "assistant"]
        assert any(
            each.reward == r.outcome and spoken[-1] == r.turns[-1].observation
            for r in by_key[each.task_key]
        )
        assert {t.name for t in each.tools} == {
            t["function"]["name"] for t in json.loads(by_key[each.task_key][0].tools or "[]")
        }


def test_conditions_select_episodes(run, capsys):
    main(["episodes", str(run), "--keep", "turns >= 1"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows
    assert {"messages", "success", "reward"} <= rows[0].keys()
    with pytest.raises(SystemExit):
        main(["episodes", str(run), "--keep", "turns > 99"])
    assert "training episodes that" in capsys.readouterr().err
