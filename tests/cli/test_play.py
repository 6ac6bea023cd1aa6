"""`gspo-env play`: an episode by hand."""

import io
import re

import pytest
from support.runs import write_env

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.main import main
from gspo_env.config import Config, override
from gspo_env.model.save import save_model


def played(monkeypatch, capsys, typed, *arguments):
    """What the command prints to somebody who types these lines."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    main(["play", *arguments])
    return capsys.readouterr().out


def test_a_person_sees_what_the_policy_reads_and_what_each_turn_earns(monkeypatch, capsys):
    output = played(
        monkeypatch, capsys, "/expert\n" * 8, "gspo/Lookup-v0", "--env-kwargs", "hops=2"
    )
    assert "system: Follow the links with the lookup tool" in output
    assert "tool lookup(key): Look up the word" in output
    assert "user: Follow 2 links from" in output
    assert "Success: outcome +1, 3 turns" in output


def test_a_call_of_a_tool_is_typed_in_short_and_a_wrong_one_is_asked_again(monkeypatch, capsys):
    typed = "/lookup key=\n/nothing\n/lookup key\n/lookup 'key\n/lookup key=grass\n/quit\n"
    output = played(monkeypatch, capsys, typed, "--seed", "3")
    assert '<tool_call>{"name": "lookup", "arguments": {"key": "grass"}}</tool_call>' in output
    assert "there is no tool 'nothing'; expected one of lookup" in output
    assert "'key' is not an argument; expected name=value" in output
    assert "cannot be read" in output
    assert "2 turns" in output


def test_an_action_of_several_lines_is_one_action(monkeypatch, capsys, tmp_path, in_folder):
    step = "return repr(action) + '\\x1b[2J', 1.0, True, False, {}"
    write_env(tmp_path / "own.py", step)
    output = played(monkeypatch, capsys, '"""\none\ntwo\n"""\n', "own.py:Own")
    assert "'one\\ntwo'" in output
    assert "\x1b" not in output


def test_neither_bytes_that_are_no_text_nor_a_narrow_terminal_end_the_game(
    monkeypatch, tmp_path, in_folder
):
    reset = r"return 'h\u00e9 \x1b[31m', {}"
    write_env(tmp_path / "own.py", "return repr(action), 1.0, True, False, {}", reset)
    typed, shown = io.BytesIO(b"\xff\xfe h\xc3\xa9\n"), io.BytesIO()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(typed, encoding="utf-8"))
    out = io.TextIOWrapper(shown, encoding="ascii", write_through=True)
    monkeypatch.setattr("sys.stdout", out)
    main(["play", "own.py:Own"])
    output = shown.getvalue().decode()
    assert "user: h\\xe9 \\x1b[31m" in output
    assert r"\\xff\\xfe h\xe9" in output
    assert "Success" in output or "No success" in output


def test_the_end_of_the_input_ends_the_episode(monkeypatch, capsys):
    assert "0 turns" in played(monkeypatch, capsys, "")


def test_an_environment_that_fails_says_how_and_one_without_a_demonstrator_says_so(
    monkeypatch, capsys, tmp_path, in_folder
):
    write_env(tmp_path / "own.py", "raise OSError('no disk')")
    with pytest.raises(SystemExit, match="1"):
        played(monkeypatch, capsys, "/expert\nsomething\n", "own.py:Own")
    output = capsys.readouterr().out
    assert "this environment has no demonstrator" in output
    assert "The environment failed: " in output
    assert "no disk" in output


@pytest.fixture
def saved(tmp_path, player):
    """The folder of a model that knows the words of the look-up environment."""
    save_model(player.model, player.tokenizer, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("typed", ["", "/go\n", "\n" * 20])
def test_a_model_is_watched_and_its_tokens_are_shown(monkeypatch, capsys, saved, typed):
    output = played(monkeypatch, capsys, typed, "--model", str(saved), "--max-turn-tokens", "3")
    assert "user: Follow " in output
    assert re.search(r"model: .*\(cut after 3 tokens\)", output)
    assert output.count(" links from ") == 1
    assert "No success" in output


def test_a_turn_of_a_model_is_taken_over_and_the_environment_gets_it(monkeypatch, capsys, saved):
    flags = ("--model", str(saved), "--env-kwargs", "hops=2")
    output = played(monkeypatch, capsys, "/expert\n" * 8, *flags)
    assert "Success: outcome +1, 3 turns" in output
    assert "ended by you" in played(monkeypatch, capsys, "/expert\n/quit\n", *flags)
    output = played(monkeypatch, capsys, "/expert\n\n/expert\n", *flags, "--temperature", "0")
    assert "\nmodel: " in output.replace("> ", "\n")
    assert "Error" not in output.partition("model: ")[0]


def test_a_model_trained_with_compaction_summarizes_and_a_typed_action_reaches_the_environment(
    monkeypatch, capsys, tmp_path, player
):
    changes = {
        "compaction": {"name": "summary", "instruction": "stone?", "summary_tokens": 24},
        "rollout": {"max_context": 150, "max_turn_tokens": 24},
    }
    options = {"env": player.env_id, "tokenizer": player.tokenizer}
    GSPOAgent(player.model, config=override(Config(), changes), **options).save(tmp_path / "model")
    flags = ("--model", str(tmp_path / "model"), "--env-kwargs", "hops=4")
    output = played(monkeypatch, capsys, "/expert\n" * 8, *flags)
    assert "\nmodel: " in output  # a summary, which nobody types
    assert re.search(r"Success: outcome \+1, [67] turns", output)


def test_an_episode_that_no_reward_scores_is_neither_a_success_nor_a_failure(
    monkeypatch, capsys, tmp_path, in_folder
):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say yes."}\n')
    text = "def some(attempt):\n    return None if attempt.text == 'no' else 0.0\n"
    (tmp_path / "rewards.py").write_text(text)
    flags = ("--env-kwargs", "data=rows.jsonl", "rewards=rewards.py:some")
    output = played(monkeypatch, capsys, "no\n", "gspo/Dataset-v0", *flags)
    assert "Not scored: outcome" in output
    output = played(monkeypatch, capsys, "yes\n", "gspo/Dataset-v0", *flags)
    assert "No success: outcome" in output
