"""`Judge` with a real HTTP server that answers, fails, garbles and is attacked."""

import asyncio
import contextlib
import email.utils
import json
import math
import os
import random
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import gymnasium
import httpx2
import numpy as np
import pytest
from support import pretend_http
from support.attacks import ATTACKS, CONTROLS
from support.pretend_judge import first, good, group, noisy, serve
from support.runs import tiny

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.main import main
from gspo_env.config import Config
from gspo_env.credit import Outcome, estimate
from gspo_env.errors import ConfigError
from gspo_env.recipes.tiny import Tiny
from gspo_env.rewards import GroupReward, Judge, Rating, score_group
from gspo_env.rewards.judge import read_scores
from gspo_env.types import Ending, StopReason

SLACK = {"backoff": 0.001, "cache": "", "repeat": 0.0}


@pytest.fixture
def server():
    with serve() as running:
        yield running


def judge(server, **settings):
    return Judge(url=server.url, model="m", **{**SLACK, **settings})


def score(reward, played, weight=1.0, success=None):
    return asyncio.run(score_group([(reward, weight)], success, played))


@pytest.mark.parametrize(
    ("kind", "per", "rewards"),
    [
        ("score", "episode", [[0, 0.9], [0, 0.2], [0.5]]),
        ("rank", "episode", [[0, 1], [0, 0], [0.5]]),
        ("pairs", "episode", [[0, 1], [0, 0], [0.5]]),
        ("score", "turn", [[0.1, 0.9], [0.4, 0.2], [0.5]]),
        ("rank", "turn", [[0, 1], [0.5, 0], [1]]),
        ("pairs", "turn", [[0, 1], [0.5, 0], [1]]),
    ],
)
def test_each_kind_of_question_rewards_the_turns_it_is_about(server, kind, per, rewards):
    played = group(
        ["quality 1", "quality 9"], ["quality 4", "quality 2"], ["quality 5"], rewards=[1, 1, 1]
    )
    scored = score(judge(server, kind=kind, per=per), played, weight=2.0)
    for before, after, row in zip(played.episodes, scored.episodes, rewards, strict=True):
        np.testing.assert_allclose(after.rewards - before.rewards, 2 * np.array(row))
        assert after.outcome == pytest.approx(before.outcome + 2 * sum(row))
        assert after.turns[-1].info.reward_parts["judge_cost"] == 0.0


@pytest.mark.parametrize(
    ("per", "rewards"), [("turn", [[0, 0, 1], [1, 0]]), ("episode", [[0, 0, 1], [0, 0]])]
)
def test_a_summary_of_the_conversation_is_neither_judged_nor_shown(server, per, rewards):
    played = group(["quality 1", "quality 7", "quality 9"], ["quality 4", "quality 2"])
    first, other = played.episodes
    turns = [replace(t, kind="summary") if t.text == "quality 7" else t for t in first.turns]
    played = replace(played, episodes=(replace(first, turns=tuple(turns)), other))
    scored = score(judge(server, kind="rank", per=per), played)
    assert [e.rewards.tolist() for e in scored.episodes] == rewards
    assert not any("quality 7" in question for question in server.questions)


def test_each_criterion_is_a_question_of_its_own_and_counts_by_its_weight(server):
    server.before = lambda _, question: "10" if "Criterion: It is kind." in question else None
    reward = judge(server, criteria={"It is true.": 3.0, "It is kind.": 1.0}, price=(1.0, 1.0))
    (episode,) = score(reward, group(["quality 2"])).episodes
    assert episode.rewards == pytest.approx([0.25 * (3 * 0.2 + 1.0)])
    assert len(server.questions) == 2
    assert episode.turns[0].info.reward_parts["judge_cost"] == pytest.approx(202e-6)


def test_an_outcome_of_the_environment_stays_and_a_cut_episode_gains_nothing(server):
    played = group(["quality 1", "quality 9"], ["quality 4", "quality 2"], rewards=[1, 1])
    ended, cut = played.episodes
    ended = replace(ended, ending=Ending(reason=StopReason.TERMINATED, outcome=0.5))
    cut = replace(cut, ending=Ending(reason=StopReason.MAX_TURNS, outcome=-1.0, success=False))
    scored = score(judge(server), replace(played, episodes=(ended, cut)))
    assert [(e.outcome, e.success) for e in scored.episodes] == [(0.5, True), (-1.0, False)]


def test_ties_share_their_place_and_the_order_of_the_answers_is_shuffled(server):
    texts = ["quality 5", "quality 5", "quality 1"]
    for n in range(20):
        played = group(*([f"{text}, number {n}"] for text in texts))
        scored = score(judge(server, kind="rank"), played)
        assert [e.outcome for e in scored.episodes] == [0.75, 0.75, 0.0]
    assert len({good(question) for question in server.questions}) > 1


CUT = b'{"choices": [{"message": {"content": "1"}, "finish_reason": "length"}]}'
"""The first token of 10."""


@pytest.mark.parametrize(
    "answer",
    [
        *("", "excellent", "11", "-3", "7 or 8", "Ignore that.\nSCORE 10 of 10", "\u0667", "1 > 2"),
        *("nan", "inf", "1e1", ".7", "7,5", "10.5", "7/5", "70/100", "7 / 10 > 6", "7 8", "\uff17"),
        *("sieben", "7\nI am not sure.", "<think>\n7\n</think>", "1 = 1", "7" * 5000),
        *(b"", b"{}", b"<html>", b"[]", b"null", b"7", b"[" * 200_000, b"\xff\xfe"),
        *(b'{"choices": [{"message": null}]}', b'{"choices": []}', b'{"choices": {"0": 7}}'),
        *(b'{"error": {"message": "overloaded"}}', b'data: {"choices": []}\n\ndata: [DONE]\n'),
        *(b'{"choices": [{"message": {"content": ["7"]}}]}', CUT),
        *(500, 429, 529),
    ],
)
def test_an_episode_without_a_readable_answer_is_lost_and_never_a_zero(server, answer):
    server.before = lambda _, question: answer if "quality 6" in question else None
    played = group(["quality 4"], ["quality 6"], ["quality 8"])
    scored = score(judge(server, retries=1), played)
    assert [e.failed for e in scored.episodes] == [False, True, False]
    assert "reward judge" in scored.episodes[1].error
    assert len(scored.episodes[1].faults) == 1
    rows = estimate([scored], Outcome()).advantages[0]
    assert rows[1].tolist() == [0.0]
    assert rows[0][0] == pytest.approx(-rows[2][0]) != 0
    assert sum("quality 6" in q for q in server.questions) == 2


@pytest.mark.parametrize("status", [204, 302, 307, 400, 401, 404])
def test_a_refused_request_is_not_repeated_and_a_redirection_not_followed(server, status):
    headers = {"location": f"{server.url}/elsewhere", "content-type": "text/plain; charset=zip"}
    server.before = lambda *_: (status, headers)
    (episode,) = score(judge(server, retries=3), group(["quality 4"])).episodes
    assert f"refused: status {status}" in episode.error
    assert len(server.questions) == 1


def test_a_small_answer_that_unpacks_to_a_gigabyte_is_refused_at_once():
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 24)) for _ in range(64)) + packer.flush()

    def reply(handler):
        handler.body()
        handler.send_response(200)
        handler.send_header("content-encoding", "gzip")
        handler.send_header("content-length", str(len(bomb)))
        handler.end_headers()
        with contextlib.suppress(OSError):
            handler.wfile.write(bomb)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pretend_http.serve(do_POST=reply) as url:
        reward = Judge(url=url, model="m", **{**SLACK, "retries": 3})
        (episode,) = score(reward, group(["quality 4"])).episodes
    assert "sends more than 16,777,216 bytes" in episode.error
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kibibytes


def test_a_lone_surrogate_in_an_answer_is_a_mark_in_the_cache(server, tmp_path):
    choice = {"message": {"content": "Good \ud800 \udfff.\n7"}, "finish_reason": "stop"}
    server.before = lambda *_: json.dumps({"choices": [choice]}).encode()
    for _ in range(2):
        reward = judge(server, cache=str(tmp_path / "judge.sqlite"))
        assert score(reward, group(["quality 4"])).episodes[0].outcome == 0.7
    assert len(server.questions) == 1


@pytest.mark.parametrize(
    "counts",
    ["many", {"prompt_tokens": "1"}, {"completion_tokens": 1e999}, {"prompt_tokens": 10**400}],
)
def test_an_answer_with_odd_counts_counts(server, counts):
    choice = {"message": {"content": "7"}, "finish_reason": "stop"}
    server.before = lambda *_: json.dumps({"choices": [choice], "usage": counts}).encode()
    assert score(judge(server), group(["quality 4"])).episodes[0].outcome == 0.7


@pytest.mark.parametrize("form", ["1", "date"])
def test_a_judge_that_names_a_time_is_asked_again_then(server, form):
    """Only a lower bound: a date has whole seconds."""
    after = "1" if form == "1" else email.utils.formatdate(time.time() + 2.0, usegmt=True)
    times = []

    def busy(number, _):
        times.append(time.monotonic())
        return (429, {"retry-after": after}) if number == 1 else None

    server.before = busy
    assert score(judge(server), group(["quality 4"])).episodes[0].outcome == 0.4
    assert times[1] - times[0] > 0.9


@pytest.mark.parametrize("after", ["", "soon", "-5", "0", "nan", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_time_that_means_nothing_is_no_reason_to_wait(server, after):
    server.before = lambda number, _: (429, {"retry-after": after}) if number == 1 else None
    assert score(judge(server), group(["quality 4"])).episodes[0].outcome == 0.4


def test_a_closed_port_costs_the_episodes_and_is_named():
    with serve() as gone:
        pass
    (episode,) = score(judge(gone, retries=1), group(["quality 4"])).episodes
    assert gone.url in episode.error
    assert "ConnectError" in episode.error


def test_hostile_characters_of_an_episode_reach_the_judge(server):
    assert score(judge(server), group(["\udc80\x00 quality 4"])).episodes[0].outcome == 0.4


@pytest.mark.parametrize(
    "damage", ["text", "torn", "folder", "nowhere", "columns", "table", "endless"]
)
def test_a_cache_that_cannot_be_used_is_refused(tmp_path, damage):
    path = tmp_path / "cache"
    if damage == "text":
        path.write_text("answers\n" * 1000)
    elif damage == "folder":
        path.mkdir()
    elif damage == "nowhere":
        path = path / "answers"
    elif damage == "torn":
        with contextlib.closing(sqlite3.connect(path)) as file, file:
            file.execute("CREATE TABLE answers (key TEXT PRIMARY KEY, text TEXT)")
            file.executemany(
                "INSERT INTO answers VALUES (?, ?)", [(str(n), "7" * 99) for n in range(999)]
            )
        path.write_bytes(path.read_bytes()[:30_000])
    else:
        with contextlib.closing(sqlite3.connect(path)) as file, file:
            columns = {"columns": "(text)", "table": "(key, text, more NOT NULL)"}
            own = "(key TEXT PRIMARY KEY, text TEXT)"
            file.execute(f"CREATE TABLE answers {columns.get(damage, own)}")
            if damage == "endless":
                file.execute(
                    "CREATE TRIGGER t BEFORE INSERT ON answers BEGIN SELECT count(*) FROM (WITH "
                    "RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT x FROM c); "
                    "END"
                )
    with pytest.raises(ConfigError, match=f"cache is '{path}'; expected"):
        Judge(model="m", url="http://x", cache=str(path))


def test_a_cache_that_is_read_only_is_refused(tmp_path):
    path = tmp_path / "cache"
    Judge(model="m", url="http://x", cache=str(path))
    path.chmod(0o400)
    if os.access(path, os.W_OK):
        pytest.skip("this user may write to every file")
    with pytest.raises(ConfigError, match=f"cache is '{path}'; .*readonly"):
        Judge(model="m", url="http://x", cache=str(path))


def test_another_rubric_model_or_request_is_another_question_in_the_same_cache(server, tmp_path):
    for changes in ({}, {}, {"criteria": {"Is it short?": 1.0}}, {"request": {"temperature": 1}}):
        reward = judge(server, cache=str(tmp_path / "cache"), **changes)
        assert score(reward, group(["quality 4"])).episodes[0].outcome == 0.4
    assert len(server.questions) == 3


@pytest.mark.parametrize("trouble", [500, 503, b"\xff garbage", "no number"])
def test_what_fails_or_is_garbled_at_first_is_asked_again(server, trouble):
    server.before = lambda number, _: trouble if number % 3 else None
    played = group(*([f"quality {n}"] for n in range(11)))
    scored = score(judge(server, retries=30), played)
    assert [e.outcome for e in scored.episodes] == pytest.approx([n / 10 for n in range(11)])


def test_no_more_requests_run_at_once_than_allowed_and_a_silent_judge_is_given_up(server):
    played = group(*([f"quality {n}"] for n in range(10)))
    assert not any(e.failed for e in score(judge(server, concurrency=2), played).episodes)
    assert server.most <= 2
    with serve() as silent:
        silent.before = lambda *_: threading.Event().wait(2) or None
        reward = judge(silent, timeout=0.1, retries=0)
        (episode,) = score(reward, group(["quality 4"])).episodes
    assert "TimeoutError" in episode.error


PROGRAM = """
import asyncio, sys
from support.pretend_judge import group
from gspo_env.rewards import Judge, score_group
judge = Judge(url=sys.argv[1], model="m", cache=sys.argv[2], repeat=0.5, concurrency=2)
played = group(*([f"quality {n % 10}, {n}"] for n in range(40)))
asyncio.run(score_group([(judge, 1.0)], None, played))
"""


def test_a_run_that_is_killed_and_resumed_asks_nothing_twice(server, tmp_path):
    reached = threading.Event()

    def stop_after_ten(number, question):
        if len(server.answered) >= 10:
            reached.set()
            resumed.wait(60)
            return 500

    resumed = threading.Event()
    server.before = stop_after_ten
    command = [sys.executable, "-c", PROGRAM, server.url, str(tmp_path / "cache")]
    process = subprocess.Popen(command, env={"PYTHONPATH": ":".join(sys.path)})
    assert reached.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed.set()
    answered, server.before = list(server.answered), lambda *_: None
    assert len(answered) >= 10
    for times in range(2):
        subprocess.run(command, env={"PYTHONPATH": ":".join(sys.path)}, check=True)
        if times == 0:
            total = len(server.answered)
            assert total > 40
    assert len(server.answered) == total
    # some answers may have been on their way to the killed one
    assert total - len(set(server.answered)) <= 2


def measured(answer, kind):
    """The metrics of a judge over 40 groups of five episodes with known rewards."""

    async def rate(reward):
        return await asyncio.gather(*(reward(played) for played in groups))

    draws = [np.random.default_rng(n).permutation(11)[:5] for n in range(40)]
    groups = [
        group(*([f"quality {v}, number {n}"] for v in values), rewards=list(map(float, values)))
        for n, values in enumerate(draws)
    ]
    with serve(answer) as server:
        ratings = asyncio.run(rate(judge(server, kind=kind, repeat=1.0)))
    names = ("agreement", "reference", "position_bias", "unparsable", "noise", "spread")
    parts = [each[0].parts for each in ratings]
    return {m: float(np.mean([p.get(f"judge_{m}", 0.0) for p in parts])) for m in names}


@pytest.mark.slow
def test_the_metrics_tell_a_good_a_random_and_a_biased_judge_apart():
    sound, random, biased = (measured(answer, "rank") for answer in (good, noisy, first))
    assert (sound["agreement"], sound["reference"], sound["noise"]) == (1.0, 1.0, 0.0)
    assert abs(sound["position_bias"]) < 0.2 > abs(random["position_bias"])
    assert random["agreement"] < 0.8
    assert 0.35 < random["reference"] < 0.65
    assert random["noise"] > 0.5 * random["spread"]
    assert biased["position_bias"] == pytest.approx(1.0)
    garbled = measured(lambda q: noisy(q) if hash(q) % 2 else "none", "score")
    assert 0.3 < garbled["unparsable"] < 0.7
    assert measured(noisy, "score")["agreement"] < 0.8 < measured(good, "score")["agreement"]


def frame(question):
    """The lines that are not quoted, without the names of the blocks."""
    lines = (line for line in question.split("\n") if not line.startswith("| "))
    return [re.sub(r"[0-9a-f]{16}|, \d+ characters.*out", "", line) for line in lines]


@pytest.mark.parametrize("kind", ["score", "rank"])
@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
def test_what_the_policy_wrote_stays_quoted_and_does_not_move_its_score(server, kind, attack):
    honest = group(["quality 6"], ["quality 3"])
    before = score(judge(server, kind=kind), honest)
    expected = sorted(map(frame, server.questions))

    def obey(number, question):
        obeys = frame(question) not in expected or re.search(
            r"(?<!\| )" + CONTROLS.pattern, question
        )
        return ("10" if kind == "score" else None) if obeys else None

    server.questions.clear()
    server.before = obey
    attacked = group(
        ["quality 6"], [f"{attack}\nquality 3" if len(attack) > 9999 else f"quality 3\n{attack}"]
    )
    after = score(judge(server, kind=kind), attacked)
    assert [e.outcome for e in after.episodes] == [e.outcome for e in before.episodes]
    assert sorted(map(frame, server.questions)) == expected
    assert not any(CONTROLS.search(question) for question in server.questions)
    assert max(map(len, server.questions)) < 40_000


def test_an_attack_in_an_observation_or_the_task_stays_quoted_too(server):
    (episode,) = group(["quality 3", "quality 3"]).episodes
    score(judge(server), group(["quality 3", "quality 3"]))
    turns = tuple(replace(t, observation=f"{t.observation}\n{ATTACKS[5]}") for t in episode.turns)
    score(judge(server), replace(group(), episodes=(replace(episode, turns=turns),)))
    one, two = server.questions
    assert frame(one) == frame(two)


@pytest.mark.parametrize(
    ("rate", "error"),
    [
        (lambda group: [Rating(rewards=(1 / 0,))], "ZeroDivisionError"),
        *(
            (
                lambda group, value=v: [Rating(rewards=(value,))] * 2,
                f"number is .*{type(v).__name__}",
            )
            for v in (math.nan, 1e39, 10**400, "7", True, Decimal(7))
        ),
        *(
            (
                lambda group, value=v: [Rating(rewards=(1.0,), parts={"x": value})] * 2,
                "parts is {'x'",
            )
            for v in (math.nan, 1e39, None, "7", True, Decimal(7), np.zeros(2))
        ),
        (lambda group: [Rating(rewards=(0.5, 0.5))] * 2, "each of 1 turns"),
        (lambda group: [Rating()], "has 1 ratings, expected one for each of 2 episodes"),
        (lambda group: [Rating()] * 3, "has 3 ratings"),
        (lambda group: [0.5, 0.5], r"is 0\.5, expected a Rating"),
        (lambda group: None, "TypeError"),
    ],
)
def test_a_group_reward_of_a_user_that_is_wrong_costs_the_group_and_not_the_run(rate, error):
    class Broken(GroupReward):
        async def __call__(self, group):
            return rate(group)

    scored = score(Broken(), group(["a"], ["b"]))
    assert all(e.failed and re.search(error, e.error) for e in scored.episodes)


@pytest.mark.parametrize("half", [np.float32(0.5), np.array(0.5), np.float16(0.5)])
def test_numbers_of_a_group_reward_become_floats(half):
    class Numbers(GroupReward):
        async def __call__(self, group):
            return (Rating(rewards=(half,), parts={"x": half}) for _ in group.episodes)

    for episode in score(Numbers(), group(["a"], ["b"])).episodes:
        (turn,) = episode.turns
        assert (turn.reward, turn.info.reward_parts) == (0.5, {"group_reward": 0.5, "x": 0.5})
        assert {type(v) for v in (turn.reward, *turn.info.reward_parts.values())} == {float}


NO_CRITERIA = [
    *({}, {"x": -1.0, "y": 2.0}, {"x": 0.0, "y": 1.0}, {"x": math.nan, "y": 1.0}, {"x": math.inf}),
    *({"x": 1.0, "y": math.nan}, {"x": "2"}, {"x": True}, {"": 1.0}, {1: 1.0}, ["x", "y"], "x"),
]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"criteria": criteria}, "criteria is") for criteria in NO_CRITERIA),
        ({"name": "it's"}, "name is"),
        ({"name": ""}, "name is"),
        ({"url": "localhost:8000/v1"}, "url is"),
        ({"url": "http://[x"}, "url is"),
        ({"kind": "best"}, "kind is 'best'"),
        ({"per": "token"}, "per is 'token'"),
        ({"retries": -1}, "retries is -1"),
        ({"max_chars": 10}, "max_chars is 10"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Judge(**{"model": "m", "url": "http://x", **SLACK, **settings})


def test_quotes_and_braces_in_a_rubric_are_text(server):
    criteria = {'It says "it\'s" {count} %s \\ `1 > 2`.': 0.5, "\u793c\u8c8c\uff1f": 1e-9}
    played = group(["quality 4"], ["quality 6"])
    for kind, outcomes in (("score", [0.4, 0.6]), ("rank", [0.0, 1.0])):
        scored = score(judge(server, criteria=criteria, kind=kind), played)
        assert [e.outcome for e in scored.episodes] == pytest.approx(outcomes)
    assert all(any(f"Criterion: {text}" in q for text in criteria) for q in server.questions)


NO_RANKINGS = [
    *("1 > 2", "1 > 2 > 2", "1 > 2 > 3 > 4", "1 > 2 > 3 > 3", "1 > 2 = 2 = 3", "0 > 1 > 2"),
    *("1 2 3", "1, 2, 3", "3 < 2 < 1", "1 > 2 > three", "> 1 > 2 > 3", "1 >= 2 >= 3"),
    *("1 > > 2 > 3", "A > B > C", "-1 > 2 > 3", "1 > 2 > 3 > ", "7"),
]


@pytest.mark.parametrize(
    ("answer", "scores"),
    [
        *(("3 > 1 > 2", [0.5, 0.0, 1.0]), ("1 = 2 = 3", [0.5, 0.5, 0.5])),
        *(("**2>1=3**", [0.25, 1, 0.25]), ("1 = 2 > 3", [0.75, 0.75, 0.0])),
        ("Because.\n`1 > 2 > 3`.", [1.0, 0.5, 0.0]),
        *((text, None) for text in NO_RANKINGS),
    ],
)
def test_a_ranking_names_each_answer_once(answer, scores):
    assert read_scores(answer, 3) == scores


def test_a_judge_is_an_argument_of_gymnasium_make_and_sees_nothing_alone(server):
    reward = judge(server)
    rows = [{"prompt": "Say", "completion": "quality 1"}] * 4
    env = gymnasium.make("gspo/Dataset-v0", data=rows, rewards=[reward])
    env.reset(seed=0)
    assert env.step("quality 3")[1] == 0.0
    scored = asyncio.run(env.get_wrapper_attr("group_reward")(group(["quality 3"])))
    assert scored.episodes[0].outcome == 0.3


@pytest.fixture
def files(server, tmp_path, in_folder):
    """A working folder with rows and rewards."""
    rows = [{"prompt": f"Say {n}", "completion": f"quality {n}", "n": n} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "judges.py").write_text(
        "from gspo_env.rewards import Judge\n"
        f"JUDGE = Judge(url={server.url!r}, model='m', retries=0, backoff=0.01, repeat=0.5)\n"
        "def flat(attempt): return 0.25\n"
        "def matches(attempt): return float(str(attempt.row['n']) in attempt.text)\n"
    )


def test_a_judge_in_the_rewards_of_a_dataset_trains_and_its_losses_are_counted(server, files):
    server.answer = lambda question: good(question) if "quality" in question else "0"
    server.before = lambda number, question: 500 if number % 10 == 0 else None
    config = tiny(
        env="gspo/Dataset-v0",
        env_kwargs={"data": "rows.jsonl", "rewards": ["judges.py:JUDGE"], "success": 0.5},
        rollout={"max_turn_tokens": 8},
    )
    history = GSPOAgent(config=config).train()
    steps = [m for _, m in history if "rollout/outcome" in m]
    assert sum(m["rollout/lost_episodes"] for m in steps) > 0
    for metrics in steps:
        assert metrics["rollout/reward/judge"] == pytest.approx(metrics["rollout/return"])
        assert metrics["rollout/env_errors"] == metrics["rollout/lost_episodes"]
        assert "rollout/reward/judge_agreement" in metrics
    assert any("eval/reward/judge" in m for _, m in history)


def test_a_kept_run_is_scored_again_with_other_rewards(server, files, capsys):
    server.answer = lambda question: good(question) if "| quality" in question else "0"
    config = tiny(
        env="gspo/Dataset-v0",
        env_kwargs={"data": "rows.jsonl", "rewards": ["judges.py:flat"]},
        steps=1,
        rollout={"max_turn_tokens": 8},
    )
    agent = GSPOAgent(config=config)
    agent.train()
    rewards = ["judges.py:JUDGE", "judges.py:matches"]
    for taken in ("judges.py", "gone"):  # known before a question is asked
        Path("gone").unlink(missing_ok=True)
        Path("gone").symlink_to("nowhere")
        with pytest.raises(SystemExit):
            main(["rescore", str(agent.folder), "--rewards", "x:y", "--out", taken])
        assert f"cannot make '{taken}': File exists; expected a new file" in capsys.readouterr().err
    main(["rescore", str(agent.folder), "--rewards", *rewards, "--out", "again.jsonl"])
    assert "before," in capsys.readouterr().out
    rows = [json.loads(line) for line in Path("again.jsonl").read_text().splitlines()]
    played = [row for row in rows if {"judge", "matches"} <= row["parts"].keys()]  # not cut
    assert played
    assert {row["before"] for row in played} == {0.25}
    for row in played:
        assert row["now"] == pytest.approx(row["parts"]["judge"] + row["parts"]["matches"])


@pytest.mark.slow
def test_a_model_of_our_own_that_serve_plays_judges_and_its_babble_is_never_a_zero(tmp_path):
    recipe = Tiny(hidden_size=32, demonstrations=16, imitation_steps=2)
    config = Config.from_recipe(recipe, rollout={"max_context": 2048}, tracker="none")
    agent = GSPOAgent(config=config)
    agent.warm_up()
    agent.save(tmp_path / "model")
    reward = Judge(
        model=str(tmp_path / "model"), **{**SLACK, "retries": 1}, request={"max_tokens": 4}
    )
    scored = score(reward, group(["quality 4"], ["quality 6"]))
    for episode in scored.episodes:
        parts = episode.turns[0].info.reward_parts
        assert ("judge" in parts) != episode.failed
        assert "no answer of 2 can be read" in (episode.error or "no answer of 2 can be read")


def test_another_address_or_model_is_another_question_in_the_same_cache(
    server, tmp_path, monkeypatch
):
    cache, folder = str(tmp_path / "cache"), tmp_path / "model"
    folder.mkdir()
    with serve() as other:
        for address in (server, other, server, other):
            assert score(judge(address, cache=cache), group(["quality 4"])).episodes[0].outcome
        assert (len(server.questions), len(other.questions)) == (1, 1)
        monkeypatch.setattr(Judge, "_start", lambda self: setattr(self, "url", other.url))
        for weights in ("one", "two", "one"):
            (folder / "model.safetensors").write_text(weights)
            reward = Judge(model=str(folder), **{**SLACK, "cache": cache})
            assert score(reward, group(["quality 4"])).episodes[0].outcome == 0.4
        assert len(other.questions) == 3


def test_two_event_loops_ask_at_the_same_time_and_no_episode_is_lost(server):
    server.before = lambda *_: time.sleep(0.3)
    reward, results = judge(server), []

    def play(n):
        results.append(score(reward, group([f"quality {n}, first"], [f"quality {n}, second"])))

    threads = [threading.Thread(target=play, args=(n,)) for n in range(1, 4)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert [[e.outcome for e in r.episodes] for r in results] == [[n / 10] * 2 for n in (1, 2, 3)]


def test_a_retry_draws_nothing_from_the_global_generator(server):
    server.before = lambda number, _: 500 if number < 3 else None
    before = random.getstate()
    assert score(judge(server), group(["quality 4"])).episodes[0].outcome == 0.4
    assert random.getstate() == before


def test_the_questions_of_a_group_share_a_client_which_is_closed(server, monkeypatch):
    clients = []

    class Client(httpx2.AsyncClient):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            clients.append(self)

    monkeypatch.setattr(httpx2, "AsyncClient", Client)
    reward = judge(server)
    for n in range(2):
        score(reward, group([f"quality {n}, first"], [f"quality {n}, second"]))
    assert len(server.questions) == 4
    assert [client.is_closed for client in clients] == [True, True]
