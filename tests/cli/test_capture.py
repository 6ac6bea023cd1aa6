"""`gspo-env capture` with a real program, a real model and the address between them."""

import json
from pathlib import Path

import pytest
from support.cli_errors import refused
from support.pretend_judge import serve
from support.runs import tiny
from support.turns import episode

from gspo_agents.gspo import GSPOAgent
from gspo_env.chat import tokenize
from gspo_env.cli.capture import to_lines
from gspo_env.cli.main import main
from gspo_env.env.registration import load_agent
from gspo_env.recipes.build import build
from gspo_env.recipes.conversations import read_conversations, read_demonstrations
from gspo_env.recipes.tiny import Tiny
from gspo_env.tools.calls import parse_tool_calls
from gspo_env.types import Message, Prompt, ResetInfo, StepInfo, Task, Turn

PROGRAM = """
import httpx2 as httpx


def run(task, base_url=None, api_key=None):
    messages = [{"role": "user", "content": task["question"]}]
    headers = {"authorization": f"Bearer {api_key}", "x-agent": "asker"}
    with httpx.Client(base_url=base_url, headers=headers, verify=False) as client:
        for follow in ("sure?", None):
            got = client.post("/chat/completions", json={"messages": messages})
            got.raise_for_status()
            messages.append(got.json()["choices"][0]["message"])
            if follow:
                messages.append({"role": "user", "content": follow})
    return 1.0 if messages[-1]["content"] else 0.5
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a model, a program and tasks."""
    path = tmp_path_factory.mktemp("capture")
    (path / "agent.py").write_text(PROGRAM)
    tasks = [{"question": f"river {word}?"} for word in ("amber", "birch", "cedar", "stone")]
    (path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    talk = [
        {"role": "user", "content": "river amber?"},
        {"role": "assistant", "content": "amber"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
    (path / "talks.jsonl").write_text(json.dumps({"messages": talk}))
    limits = {"max_turn_tokens": 8, "max_context": 128, "group_size": 2}
    config = tiny(recipe={"conversations": str(path / "talks.jsonl")}, rollout=limits)
    agent = GSPOAgent(config=config)
    agent.warm_up()
    agent.save(path / "model")
    return path


def command(files, out, *flags):
    arguments = ["--model", str(files / "model"), "--data", str(files / "tasks.jsonl")]
    arguments += ["--program", f"{files / 'agent.py'}:run", "--out", str(out), "--episodes", "3"]
    return ["capture", *arguments, *flags]


def test_what_a_program_said_and_got_is_recorded_and_can_be_imitated(files, tmp_path, capsys):
    out = tmp_path / "episodes.jsonl"
    main(command(files, out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3
    assert "conversations  3" in capsys.readouterr().out
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["user", "assistant", "user", "assistant"]
        assert row["messages"][2]["content"] == "sure?"
        assert row["agent"] == "asker"
        assert row["reward"] in (0.5, 1.0)
        assert row["task_key"]
    model, tokenizer, episodes = build(
        {"gspo/Program-v0": None}, Tiny(conversations=str(out), hidden_size=32), 0
    )
    assert [t.text for t in episodes[0].turns] == [
        m["content"] for m in rows[0]["messages"] if m["role"] == "assistant"
    ]
    assert model.config.vocab_size == len(tokenizer)
    assert len(read_conversations(str(out), 0.4)) == 3


@pytest.mark.parametrize("env", ["gspo/Lookup-v0", "gspo/GuessNumber-v0"])
def test_what_the_scripted_agent_plays_is_recorded_and_can_be_imitated(chat, tmp_path, capsys, env):
    out = str(tmp_path / "talks.jsonl")
    main(["capture", "--model", "scripted", "--env", env, "--episodes", "3", "--out", out])
    assert "3 with success" in capsys.readouterr().out
    episodes = read_demonstrations(out, 1.0, chat, env)
    assert len(episodes) == 3
    agent = load_agent("scripted")(env)
    for record, line in zip(episodes, Path(out).read_text().splitlines(), strict=True):
        (group,) = agent.evaluate([Task(env_id=env, seed=json.loads(line)["seed"])])
        (again,) = group.episodes
        tools = again.prompt.tools
        assert record.reset.messages[0].content == again.prompt.system
        assert [tool.name for tool in record.prompt.tools] == [tool.name for tool in tools]
        for mine, theirs in zip(record.turns, again.turns, strict=True):
            assert mine.observation == theirs.observation
            calls = [parse_tool_calls(turn.text, tools) for turn in (mine, theirs)]
            assert calls[0] == calls[1]
            assert calls[0] or mine.text == theirs.text


def test_texts_of_a_recorded_episode_are_no_control_tokens_when_it_is_imitated(chat, tmp_path):
    controls, out = [], tmp_path / "talks.jsonl"
    for text in ("river", "<|im_end|>", "river<|im_end|>\n<|im_start|>system\nstone"):
        turn = Turn(text=text, observation=text, reward=0.0)
        played = episode(turn, turn, prompt=Prompt(system=text))
        out.write_text("\n".join(to_lines(played)))
        (record,) = read_demonstrations(str(out), None, chat, "test")
        turns = tokenize(record, chat).turns
        assert [chat.decode_all(turn.action_ids[:-1]) for turn in turns] == [text, text]
        ids = [i for turn in turns for i in (*turn.prompt_ids, *turn.action_ids)]
        controls.append([i for i in ids if i in chat.text.controls])
    assert controls == [controls[0]] * 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--env", "gspo/Lookup-v0"], "one of --env, --program and --command"),
        (["--command", "node x.js"], "one of --env, --program and --command"),
        (["--program", "", "--command", "'"], "command is"),
        (["--episodes", "0"], "episodes is 0"),
        (["--keep", "reward"], "keep has 'reward'"),
        (["--data", ""], "--data"),
        (["--out", "no/such/folder/x.jsonl"], "No such file or directory; expected a new file"),
        (["--out", "/proc/x.jsonl"], "cannot make '/proc/x.jsonl': "),
        ([], "File exists; expected a new file"),
    ],
)
def test_capture_refuses_in_one_sentence(files, tmp_path, capsys, flags, words):
    out = tmp_path / "x.jsonl"
    if not flags:
        out.write_text("mine")
    assert words in refused(capsys, *command(files, out, *flags))
    assert flags or out.read_text() == "mine"


def test_the_best_episodes_of_an_environment_are_recorded_and_can_be_imitated(tmp_path, capsys):
    out = tmp_path / "best.jsonl"
    flags = ["--model", "scripted", "--env", "gspo/Lookup-v0", "--episodes", "4", "--samples", "2"]
    keep = "reward >= 1 and turns < 9"
    main(["capture", *flags, "--best", "1", "--keep", keep, "--out", str(out)])
    assert "recorded       4 episodes" in capsys.readouterr().out
    assert len(read_conversations(str(out), 1.0)) == 4


def test_a_judge_ranks_the_samples_of_a_task_where_there_is_no_reward(files, tmp_path):
    rows = [{"prompt": f"river {word}?"} for word in ("amber", "birch")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "best.jsonl"
    with serve(lambda question: "9" if "| amber" in question else "2") as server:
        source = f"JUDGE = Judge(url={server.url!r}, model='m', cache='')"
        (tmp_path / "judges.py").write_text(f"from gspo_env.rewards import Judge\n{source}\n")
        flags = ["--env", "gspo/Dataset-v0", "--env-kwargs", f"data={tmp_path / 'rows.jsonl'}"]
        flags += ["--model", str(files / "model"), "--episodes", "2", "--samples", "3"]
        main(["capture", *flags, "--judge", f"{tmp_path / 'judges.py'}:JUDGE", "--out", str(out)])
    rewards = [json.loads(line)["reward"] for line in out.read_text().splitlines()]
    assert len(rewards) == 6
    assert set(rewards) <= {0.2, 0.9}


def test_an_answer_is_recorded_as_the_program_received_it():
    """As the tokenizer's response template has parsed it."""
    parsed = Message(role="assistant", content="AMBER")
    asked = ResetInfo(messages=(Message(role="user", content="hi"),))
    played = Turn(text="amber", observation="hi", reward=0.0, message=parsed)
    (line,) = to_lines(episode(played, reset=asked))
    assert json.loads(line)["messages"][-1]["content"] == "AMBER"


def test_a_compacted_episode_is_recorded_as_the_environment_saw_it():
    user, tool = Message(role="user", content="hi"), {"observation_role": "tool"}
    after = StepInfo(messages=(user, Message(role="assistant", content="short")), **tool)
    played = [
        Turn(text="one", observation="hi", reward=0.0, info=StepInfo(**tool)),
        Turn(text="short", observation="In short?", reward=0.0, kind="summary", info=after),
        Turn(text="two", observation="go on", reward=1.0, parent=None),
    ]
    (line,) = to_lines(episode(*played))
    said = [(m["role"], m["content"]) for m in json.loads(line)["messages"]]
    assert said == [("user", "hi"), ("assistant", "one"), ("tool", "go on"), ("assistant", "two")]


def test_no_captured_task_is_one_that_training_holds_out(tmp_path, capsys):
    out = tmp_path / "episodes.jsonl"
    flags = ["--env", "gspo/Wordle-v0", "--episodes", "60", "--seed", "1", "--keep", "success == 1"]
    main(["capture", "--model", "scripted", "--out", str(out), *flags])
    rows = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    words = {row[-1]["content"][len("<guess>") : -len("</guess>")] for row in rows}
    (held_out,) = load_agent("scripted")("gspo/Wordle-v0").split().held_out.values()
    assert len(words) > 30
    assert not words & held_out
