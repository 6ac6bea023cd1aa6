"""Suites of others: their gold replays, their own graders decide, and no task pays for no work."""

import copy
import gc
import os
import re
import select
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from gspo_env import format_tool_call, make_env, tool
from gspo_env.check import check_env
from gspo_env.errors import ConfigError, EnvironmentCrashError
from gspo_env.rollout.play import demonstrator, play_now
from gspo_env.tools.tool import as_tool
from gspo_env.types import StopReason, Task
from gspo_envs.adapters.instances import InstanceEnv

JAVA = ("textworld_express", "scienceworld")


@pytest.fixture(autouse=True)
def wheel(request):
    """Skips a test whose mark names a wheel that is not installed, or that needs Java."""
    for mark in request.node.iter_markers("suites"):
        pytest.importorskip(mark.args[0])
        if mark.args[0] in JAVA and shutil.which("java") is None:
            pytest.skip("needs Java")


class Lamps(InstanceEnv):
    """Switch a lamp; task 2 wants the state that it has."""

    def __init__(self, **kwargs):
        super().__init__([{"want": n} for n in (1, 2, 0, 3, 4)], **kwargs)

    def name_of(self, task):
        return f"lamp_{task['want']}"

    def open(self, task):
        self.want, self.state, self.asked = task["want"], 0, 0

        @tool
        def switch(to: int) -> str:
            """Switch the lamp.

            Args:
                to: The level.
            """
            self.state = to
            return "ok"

        self.tools = (as_tool(switch),)
        return f"Level {self.want}, please."

    def reply(self, text):
        self.asked += 1
        return "Anything else?" if self.asked == 1 else None

    def grade(self):
        return self.state == self.want

    def solution(self):
        yield [("switch", {"to": 9}), ("switch", {"to": self.want})]
        yield []


def test_tasks_that_pay_for_no_call_are_left_out_and_named(caplog):
    env = Lamps()
    assert (env.free, env.num_tasks) == (["lamp_0"], 4)
    assert "Lamps leaves out 1 of 5 tasks that pay for no call at all" in caplog.text
    names = {env.reset(seed=seed)[1]["task_key"] for seed in range(60)}
    assert names == {"lamp_1", "lamp_2", "lamp_3"}  # the last one is held out
    assert env.reset(seed=10**9)[1]["task_key"] == "lamp_4"
    assert Lamps(exclude_free=False).num_tasks == 5


class Counted(Lamps):
    graded = 0

    def grade(self):
        Counted.graded += 1
        return super().grade()


def test_copies_of_a_suite_look_for_its_free_tasks_once(caplog):
    copies = [Counted(suite="lamps") for _ in range(3)]
    assert (Counted.graded, caplog.text.count("leaves out 1 of 5")) == (5, 1)
    assert [(env.free, env.num_tasks) for env in copies] == [(["lamp_0"], 4)] * 3
    for other in ({"suite": "others"}, {}, {}, {"suite": "lamps", "exclude_free": False}):
        assert Counted(**other).free == ["lamp_0"]
    assert Counted.graded == 25
    assert Lamps(suite="lamps").free == ["lamp_0"]


class Split(Lamps):
    def __init__(self, tasks, held_out):
        InstanceEnv.__init__(self, tasks, held_out=held_out)


def test_a_suite_may_hold_out_tasks_of_its_own():
    env = Split([{"want": n} for n in (1, 0, 2)], [{"want": n} for n in (0, 5, 6)])
    assert (env.num_tasks, env.num_eval_tasks, len(env.free)) == (4, 2, 2)
    assert {env.reset(seed=n)[1]["task_key"] for n in range(20)} == {"lamp_1", "lamp_2"}
    held = {env.reset(seed=10**9 + n)[1]["task_key"] for n in range(2)}
    assert held == {"lamp_5", "lamp_6"}


def test_the_solution_of_an_instance_replays_over_two_messages():
    env = Lamps()
    played = play_now(env, Task(env_id="x", seed=1), demonstrator())
    assert played.success
    assert [turn.text for turn in played.turns][2:] == ["Done.", "Done."]
    assert check_env(Lamps).demonstrated == (True, True)


@pytest.mark.suites("bfcl_eval")
@pytest.mark.parametrize(
    ("category", "solved"),
    [("base", 200), ("miss_func", 199), ("miss_param", 200), ("long_context", 200)],
)
def test_the_gold_of_bfcl_replays(category, solved):
    env = make_env("gspo/BFCL-v0", category=category)
    assert (env.unwrapped.num_tasks, env.unwrapped.free) == (200, [])
    tasks = [Task(env_id="x", seed=0, options={"row": n}) for n in range(200)]
    played = [play_now(env, task, demonstrator()) for task in tasks]
    assert not any(episode.failed for episode in played)
    # one reference of miss_func calls a function that it has hidden
    assert sum(episode.success for episode in played) == solved


@pytest.mark.suites("bfcl_eval")
def test_bfcls_own_checker_says_the_same_of_right_and_wrong_episodes():
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    env = make_env("gspo/BFCL-v0").unwrapped
    verdicts = []
    for row in range(40):
        task = Task(env_id="x", seed=row, options={"row": row})
        episode = play_now(env, task, demonstrator(0.1))
        turns = [[]]
        for turn in episode.turns:
            calls = env.parse_calls(turn.text)
            if calls:
                values = ", ".join(f"{k}={v!r}" for k, v in calls[0].arguments.items())
                turns[-1].append([f"{calls[0].name}({values})"])
            else:
                turns.append([])
        gold = env._task["gold"]
        turns = (turns + [[]] * len(gold))[: len(gold)]
        entry = copy.deepcopy({k: v for k, v in env._task.items() if k != "gold"})
        theirs = multi_turn_checker(turns, gold, entry, "multi_turn_base", f"test{row}")
        verdicts.append((episode.success, theirs["valid"]))
    assert {ours == theirs for ours, theirs in verdicts} == {True}
    assert {ours for ours, _ in verdicts} == {True, False}


@pytest.mark.suites("bfcl_eval")
def test_a_call_of_bfcl_is_never_run_as_python(tmp_path):
    env = make_env("gspo/BFCL-v0")
    env.reset(seed=0, options={"row": 0})
    for argument in (f"a=open({str(tmp_path / 'x')!r}, 'w')", "path"):
        value = f"__import__('pathlib').Path({str(tmp_path / 'x')!r}).touch()"
        observation, *_ = env.step(format_tool_call("ls", {argument: value}))
        assert re.match("Error during execution: .*unexpected keyword", observation)
    assert "unknown tool '_load_scenario'" in env.step(format_tool_call("_load_scenario", {}))[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.suites("bfcl_eval")
def test_the_certificate_of_bfcl():
    from gspo_env.audit import audit

    result = audit("gspo/BFCL-v0", tasks=32, train=0)
    assert [str(finding) for finding in result.findings if not finding.ok] == []
    assert {row.name: row.share for row in result.rows}["expert (gold)"] == 1
    assert check_env("gspo/BFCL-v0").demonstrated == (True, True)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "tasks"),
    [
        pytest.param(f"gspo/{name}-v0", kwargs, tasks, marks=pytest.mark.suites(wheel))
        for name, wheel, tasks, variants in (
            ("AgentDojo", "agentdojo", 6, [{"suite": s} for s in ("slack", "travel", "workspace")]),
            ("Tau2", "inspect_evals", 3, [{"domain": "telecom"}]),
            ("ScienceWorld", JAVA[1], 2, [{"task": "find-living-thing"}]),
            ("TextWorld", "textworld", 3, [{"game": "coin_collector", "games": 3}]),
        )
        for kwargs in variants
    ],
)
def test_the_certificate_of_a_suite(env_id, kwargs, tasks):
    from gspo_env.audit import audit

    limits = {"max_turns": 30, "timeout": 600}
    result = audit(env_id, tasks=tasks, train=0, env_kwargs=kwargs, **limits)
    shares = {row.name: row.share for row in result.rows}
    assert shares["expert (gold)"] == 1
    assert (shares["empty"], shares["one token"], shares["echo"]) == (0, 0, 0)
    wanders = env_id.endswith("World-v0")  # random commands earn a part, or find a coin near by
    assert shares["random calls"] <= 0.4 * wanders
    names = ("gold", "free tasks", "repeats")
    assert [str(f) for f in result.findings if f.name in names and not f.ok] == []


@pytest.mark.suites("agentdojo")
@pytest.mark.parametrize(
    ("suite", "tasks", "free"),
    [("banking", 16, 5), ("slack", 21, 0), ("travel", 20, 0), ("workspace", 40, 0)],
)
def test_the_gold_of_agentdojo_replays_and_free_tasks_are_left_out(suite, tasks, free):
    env = make_env("gspo/AgentDojo-v0", suite=suite, exclude_free=False)
    assert (env.unwrapped.num_tasks, len(env.unwrapped.free)) == (tasks, free)
    rows = [Task(env_id="x", seed=0, options={"row": n}) for n in range(tasks)]
    assert all(play_now(env, row, demonstrator()).success for row in rows)
    assert make_env("gspo/AgentDojo-v0", suite=suite).unwrapped.num_tasks == tasks - free


@pytest.mark.suites("agentdojo")
@pytest.mark.parametrize(("suite", "rows"), [("workspace", (22, 24, 28)), ("travel", (3, 4))])
def test_what_a_tool_of_agentdojo_writes_does_not_have_the_time_of_the_clock(suite, rows):
    env = make_env("gspo/AgentDojo-v0", suite=suite)
    for row in rows:
        task = Task(env_id="x", seed=0, options={"row": row})
        first, second = (play_now(env, task, demonstrator()) for _ in range(2))
        assert first.success
        assert [t.observation for t in first.turns] == [t.observation for t in second.turns]


@pytest.mark.suites("agentdojo")
def test_an_evaluation_of_agentdojo_has_success_and_attack_rate_side_by_side():
    env = make_env("gspo/AgentDojo-v0", inject=True)
    inner = env.unwrapped

    def attacked(follow, seed):
        env.reset(seed=seed)
        if follow:
            for call in inner._attacker.ground_truth(inner._now):
                env.step(format_tool_call(call.function, dict(call.args)))
        return env.step("Done.")[4]

    assert attacked(True, 10**9)["reward_parts"] == {"attacked": 1.0}
    assert attacked(False, 10**9)["reward_parts"] == {"attacked": 0.0}
    assert "reward_parts" not in attacked(False, 3)  # training has no attack
    gold = play_now(env, Task(env_id="x", seed=10**9), demonstrator())
    assert gold.success
    assert gold.turns[-1].info.reward_parts == {"attacked": 0.0}


@pytest.mark.suites("inspect_evals")
@pytest.mark.parametrize(
    ("domain", "tasks", "free"), [("retail", 114, 7), ("airline", 50, 19), ("telecom", 114, 0)]
)
def test_the_gold_of_tau2_replays_and_free_tasks_are_left_out(domain, tasks, free):
    env = make_env("gspo/Tau2-v0", domain=domain).unwrapped
    assert (env.num_tasks, len(env.free)) == (tasks - free, free)
    rows = [Task(env_id="x", seed=0, options={"row": n}) for n in range(4)]
    rows += [Task(env_id="x", seed=10**9 + n) for n in range(4)]
    played = [play_now(env, row, demonstrator(), max_turns=60) for row in rows]
    assert all(episode.success for episode in played)
    assert len({episode.reset.task_key for episode in played}) == 8
    idle = [play_now(env, row, lambda now: "Done.") for row in rows]
    assert not any(episode.success for episode in idle)


@pytest.mark.suites("inspect_evals")
def test_a_reservation_that_is_cancelled_again_and_again_ends_in_an_error_and_not_in_a_hang():
    env = make_env("gspo/Tau2-v0", domain="airline").unwrapped
    env.reset(seed=0)
    held = next(iter(env._now[0].db.reservations))
    cancel = format_tool_call("cancel_reservation", {"reservation_id": held})
    seen = [env.step(cancel)[0] for _ in range(30)]
    assert '"status":"cancelled"' in seen[1]
    assert "cancelled too often" in seen[-1]


@pytest.mark.suites("inspect_evals")
@pytest.mark.parametrize("domain", ["airline", "telecom"])
def test_tau2_leaves_out_its_rules_for_a_model_with_a_short_context(domain):
    envs = [make_env("gspo/Tau2-v0", domain=domain, rules=rules) for rules in (True, False)]
    full, short = (play_now(env, Task(env_id="x", seed=2), demonstrator()) for env in envs)
    assert len(full.prompt.system) > 7_000 > 100 > len(short.prompt.system)
    assert full.success
    assert short.success


@pytest.mark.suites("textworld_express")
@pytest.mark.parametrize(
    "game",
    [
        *("arithmetic", "coin", "cookingworld", "mapreader", "peckingorder", "simonsays"),
        *("sorting", "twc"),
    ],
)
def test_the_gold_of_textworld_express_replays_beside_a_second_game_of_the_seed(game):
    env, beside = (make_env("gspo/TextWorldExpress-v0", game=game) for _ in range(2))
    keys = set()
    for seed in (0, 1, 2, 10**9, 10**9 + 1, 10**9 + 2):
        first, info = env.reset(seed=seed)
        assert beside.reset(seed=seed) == (first, info)
        keys.add(info["task_key"])
        rewards, over = [], False
        while not over:
            command = env.unwrapped.expert_action()
            result = env.step(command)
            assert beside.step(command) == result
            over = result[2] or result[3]
            rewards.append(result[1])
        assert result[4]["success"]
        assert sum(rewards) == pytest.approx(1)
    env.close()
    beside.close()
    folds = [key.split()[1] for key in keys]
    assert (folds.count("train"), folds.count("test")) == (3, 3)


@pytest.mark.suites("scienceworld")
@pytest.mark.parametrize("task", ["boil", "find-living-thing", "use-thermometer", "grow-plant"])
def test_the_gold_of_scienceworld_replays_in_another_process_and_after_another_game(task):
    env, beside = (make_env("gspo/ScienceWorld-v0", task=task) for _ in range(2))
    beside.reset(seed=5)
    beside.step("look around")
    keys = set()
    for seed in (0, 1, 10**9, 10**9 + 1):
        first, info = env.reset(seed=seed)
        assert beside.reset(seed=seed) == (first, info)
        keys.add(info["task_key"])
        rewards, over = [], False
        while not over:
            command = env.unwrapped.expert_action()
            result = env.step(command)
            assert beside.step(command) == result
            over = result[2] or result[3]
            rewards.append(result[1])
        assert result[4]["success"]
        assert 0.5 < sum(rewards) <= 1 + 1e-9  # the rest is paid where the game begins
    assert env.unwrapped.java is not beside.unwrapped.java
    env.close()
    beside.close()
    assert len(keys) == 4


@pytest.mark.suites("scienceworld")
def test_the_solution_of_scienceworld_can_be_asked_for_in_the_middle_of_a_game():
    env, beside = (make_env("gspo/ScienceWorld-v0") for _ in range(2))
    for each in (env, beside):
        each.reset(seed=3)
        each.step("open door to kitchen")
    solution = [env.unwrapped.expert_action() for _ in range(3)]
    assert len(set(solution)) > 1
    for command in ("look around", *solution, "inventory"):
        assert env.step(command) == beside.step(command)
    env.close()
    beside.close()


@pytest.mark.suites("scienceworld")
@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"task": "boi"}, "has no 'boi', did you mean boil"),
        ({"simplifications": "easy,teleport"}, "has no 'teleport', did you mean teleportAction"),
    ],
)
def test_an_unknown_task_or_simplification_of_scienceworld_is_refused(kwargs, reason):
    with pytest.raises(ConfigError, match=reason):
        make_env("gspo/ScienceWorld-v0", **kwargs)


@pytest.mark.suites("textworld")
@pytest.mark.parametrize("game", ["simple", "coin_collector", "treasure_hunter", "cooking"])
def test_the_walkthrough_of_textworld_replays_beside_a_second_game_of_the_seed(game):
    env, beside = (make_env("gspo/TextWorld-v0", game=game, games=2) for _ in range(2))
    keys = set()
    for seed in (0, 1, 10**9, 10**9 + 1):
        first, info = env.reset(seed=seed)
        assert beside.reset(seed=seed) == (first, info)
        assert "$$" not in first  # the banner
        keys.add(info["task_key"])
        rewards, over = [], False
        while not over:
            command = env.unwrapped.expert_action()
            result = env.step(command)
            assert beside.step(command) == result
            over = result[2] or result[3]
            rewards.append(result[1])
        assert result[4]["success"]
        assert sum(rewards) == pytest.approx(1)
    env.close()
    beside.close()
    assert sum(" test " in key for key in keys) == 2


@pytest.mark.suites("textworld")
def test_no_command_of_textworld_reaches_the_interpreter_and_writes_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = make_env("gspo/TextWorld-v0", games=1)
    first, _ = env.reset(seed=0)
    for command in (
        "save",
        "look. save",
        "look then SAVE game",
        "transcriptx on",
        "script",
        "quit",
    ):
        assert env.step(command)[0] == "That is not a command of the game."
    assert env.step("look")[0] in first
    assert not list(tmp_path.iterdir())
    env.close()


@pytest.mark.suites("textworld")
@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"game": "chess"}, "expected one of simple, coin_collector"),
        ({"params": "--level five"}, "params is '--level five'.*invalid int.*expected .*--level"),
        ({"params": "--rooms 3"}, "params is '--rooms 3'"),
        ({"games": 0}, "games is 0, expected 1 to 20000"),
        ({"games": 20001}, "games is 20001, expected 1 to 20000"),  # they would evaluate too
    ],
)
def test_options_that_textworld_cannot_take_are_refused_when_it_is_made(kwargs, reason):
    with pytest.raises(ConfigError, match=reason):
        make_env("gspo/TextWorld-v0", **kwargs)


@pytest.mark.suites("textworld")
@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"params": "--level 301"}, "params is '--level 301'.*within .1-300."),
        ({"game": "treasure_hunter", "params": "--level 0"}, "params is '--level 0'.*within"),
    ],
)
def test_a_level_that_the_maker_of_textworld_does_not_have_is_refused_at_the_reset(kwargs, reason):
    env = make_env("gspo/TextWorld-v0", **kwargs)
    with pytest.raises(ConfigError, match=reason):
        env.reset(seed=0)
    env.close()


@pytest.mark.suites("textworld")
@pytest.mark.parametrize("params", ["--split valid", "--split=valid"])
def test_a_split_of_textworlds_cooking_that_the_user_names_holds_for_both_kinds_of_seeds(params):
    named, ours = (
        make_env("gspo/TextWorld-v0", game="cooking", params=f"--recipe 2 {each}", games=2)
        for each in (params, "")
    )
    for seed in (0, 10**9):
        assert named.reset(seed=seed)[0] != ours.reset(seed=seed)[0]
    named.close()
    ours.close()


def java_of(env):
    """Returns the Java process of an environment; its guard is the parent."""
    return psutil.Process(env.unwrapped.java.process.pid).children()[0]


@pytest.mark.suites("textworld_express")
@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGSTOP, StopReason.ENV_TIMEOUT), (signal.SIGKILL, StopReason.CRASH)],
)
def test_a_java_process_that_hangs_or_dies_loses_its_episodes_and_the_next_ones_get_another(
    number, reason
):
    env, beside = (make_env("gspo/TextWorldExpress-v0") for _ in range(2))
    beside.reset(seed=2)
    java = java_of(beside)

    def policy(now):
        assert java_of(env) == java
        java.send_signal(number)
        return "look around"

    episode = play_now(env, Task(env_id="x", seed=1), policy)
    assert (episode.failed, episode.stop_reason, episode.turns) == (True, reason, ())
    with pytest.raises(EnvironmentCrashError, match="Java process failed"):
        beside.step("look around")
    assert play_now(env, Task(env_id="x", seed=1), demonstrator()).success
    env.close()
    assert play_now(beside, Task(env_id="x", seed=2), demonstrator()).success
    java = java_of(beside)
    assert java.is_running()
    beside.close()
    assert not java.is_running()


@pytest.mark.parametrize(
    ("env_id", "stopped"),
    [
        pytest.param(f"gspo/{name}-v0", stopped, marks=pytest.mark.suites(wheel))
        for name, wheel in (("TextWorldExpress", JAVA[0]), ("ScienceWorld", JAVA[1]))
        for stopped in ("neither", "trainer", "java")
    ],
)
def test_a_java_process_ends_with_a_killed_trainer_also_if_one_of_them_is_stopped(env_id, stopped):
    code = f"""if True:
        import psutil
        from gspo_env import make_env
        env = make_env({env_id!r})
        env.reset(seed=0)
        print(psutil.Process(env.unwrapped.java.process.pid).children()[0].pid, flush=True)
        input()
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as trainer:
        java = int(trainer.stdout.readline())
        handle = os.pidfd_open(java)
        assert select.select([handle], [], [], 0)[0] == []
        if stopped != "neither":
            os.kill(trainer.pid if stopped == "trainer" else java, signal.SIGSTOP)
        trainer.kill()
    assert select.select([handle], [], [], 60)[0] == [handle]
    os.close(handle)


@pytest.mark.suites("textworld_express")
def test_what_an_old_java_says_is_in_the_error_and_other_messages_of_java_are_passed_over(
    tmp_path, monkeypatch
):
    env = make_env("gspo/TextWorldExpress-v0")
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dx=1")  # which Java tells before anything else
    env.reset(seed=0)
    env.close()
    (tmp_path / "java").write_text("#!/bin/sh\necho UnsupportedClassVersionError >&2\nexit 1\n")
    (tmp_path / "java").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(EnvironmentCrashError, match=r"java ended \(1\).*UnsupportedClassVersion"):
        env.reset(seed=0)


@pytest.mark.suites("textworld_express")
def test_games_that_were_played_do_not_fill_the_heap_of_java():
    """A game takes 0.2 MB of it; 64 are played at a time, and Python collects no garbage."""
    params = "numLocations=3,maxDistanceApart=2,maxDistractorItemsPerLocation=0,includeDoors=0"
    kwargs = {"game": "mapreader", "params": params, "memory": 40}
    envs = [make_env("gspo/TextWorldExpress-v0", **kwargs) for _ in range(64)]
    gc.disable()
    try:
        for n in range(4):
            assert all(env.reset(seed=64 * n + k)[0] for k, env in enumerate(envs))
    finally:
        gc.enable()
        for env in envs:
            env.close()


@pytest.mark.suites("textworld_express")
@pytest.mark.parametrize("params", ["numLocations=abc", "numLocations=900", "rooms=3"])
def test_parameters_that_a_game_cannot_take_are_refused_and_no_error_is_played(params):
    env = make_env("gspo/TextWorldExpress-v0", game="coin", params=params)
    with pytest.raises(ConfigError, match=f"params is '{params}'"):
        env.reset(seed=0)
    env.close()
