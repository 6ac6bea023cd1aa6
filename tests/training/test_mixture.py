"""Several environments in one run: tasks, credit, metrics, evaluation and resume by environment."""

import shutil
from pathlib import Path

import pytest
from support.cli_errors import refused
from support.runs import drawn, timeless

from gspo_agents.gspo import GSPOAgent
from gspo_env.batch.padded import bare_episode
from gspo_env.cli.main import main
from gspo_env.runs import Run
from gspo_env.saved import read_saved
from gspo_env.seeding import HELD_OUT, derive_seed
from gspo_env.training import draw_tasks
from gspo_env.training.split import Split, join
from gspo_env.types import Task


def mixed(**changes):
    return drawn(env=("two.py:Turns:3", "last=two.py:Last:1"), **changes)


@pytest.fixture
def folder(tmp_path, in_folder):
    shutil.copy(Path(__file__).parents[1] / "support" / "drawn_envs.py", tmp_path / "two.py")
    return tmp_path


def test_two_files_classes_of_one_name_hold_out_their_own_tasks(folder):
    (folder / "three.py").write_text((folder / "two.py").read_text())
    for files, alike in ((("two.py", "three.py"), False), (("two.py", "two.py"), True)):
        env = (f"a={files[0]}:Turns:3", f"b={files[1]}:Turns:1")
        held = GSPOAgent(config=drawn(env=env, output="out")).split().held_out
        assert (held["a"] == held["b"]) is alike


def test_a_run_of_two_environments_has_the_tasks_scores_and_metrics_of_each(folder, capsys):
    agent = GSPOAgent(config=mixed(output="out", env_kwargs={"Turns": {"bonus": 0.5}}))
    assert {e.task.env_id for e in agent._start.episodes} == {"Turns", "last"}
    envs = agent.environments.envs
    assert agent.environments.scores == {"Turns": "turns", "last": "outcome"}
    agent.warm_up()
    for env in envs.values():
        env.unwrapped.stepped.clear()
    history = agent.train()
    split = agent.split()
    for name, env in envs.items():
        stepped = env.unwrapped.stepped
        held = set(map(int, split.held_out[name]))
        assert {task for evaluation, task in stepped if evaluation} == held
        assert not {task for evaluation, task in stepped if not evaluation} & held
    assert split.held_out["Turns"] != split.held_out["last"]  # by environment: the keys collide
    evaluations = [m for _, m in history if "eval/success" in m]
    for metrics in evaluations:
        both = metrics["eval/Turns/success"] * 9 + metrics["eval/last/success"] * 3
        assert metrics["eval/success"] == pytest.approx(both / 12)
        assert metrics["eval/Turns/episodes"] == 9
        assert "eval/last/success_greedy" in metrics
    steps = [m for _, m in history if "rollout/success" in m]
    assert any("rollout/last/return" in m and "rollout/Turns/outcome" in m for m in steps)
    assert all(m["rollout/Turns/return"] >= 0.5 for m in steps if "rollout/Turns/return" in m)
    said = " ".join(capsys.readouterr().out.split())
    assert "two.py:Turns:3 last=two.py:Last:1" in said
    main(["evaluate", "--model", "out"])
    said = capsys.readouterr().out
    assert "in Turns (9 episodes)" in said
    assert "in last (3 episodes)" in said


def test_a_mixed_run_goes_on_bit_for_bit(folder):
    saves = {"save_every": 1, "keep": 3}
    whole = GSPOAgent(config=mixed(output="out", eval_every=0, checkpoints=saves)).train()
    shutil.rmtree("out/checkpoints/step-000003")
    agent = GSPOAgent.resume("out")
    assert agent._resumed.checkpoint.step == 2
    assert timeless(agent.train()) == timeless(whole)


def test_a_run_ends_at_its_first_evaluation_with_enough_success_and_goes_on_without_that(
    folder, capsys
):
    settings = {"steps": 2, "eval_every": 1, "checkpoints": {"save_every": 9, "keep": 9}}
    whole = GSPOAgent(config=mixed(output="whole", **settings)).train()
    (target,) = (m["eval/success"] for step, m in whole if step == 1 and "eval/success" in m)
    capsys.readouterr()
    stopped = GSPOAgent(config=mixed(output="out", stop_at_success=target, **settings)).train()
    assert timeless(stopped) == timeless([entry for entry in whole if entry[0] <= 1])
    said = capsys.readouterr().out
    assert f"Stopped after step 1 of 2: success {target:.1%} reached." in said
    assert said.rstrip().endswith("Resume:    gspo-env train --resume out --stop-at-success 0")
    run, state = Run.open("out"), "1 of 2 steps, stop_at_success reached"
    assert (run.finished, run.state) == (True, state)
    page = Path("out/view.html").read_text()
    main(["train", "--resume", "out"])
    said = capsys.readouterr().out
    assert f"out is finished: {state}; --stop-at-success 0 or --steps adds more" in said
    assert Path("out/view.html").read_text() == page
    main(["train", "--resume", "out", "--stop-at-success", "0"])
    assert "Stopped after" not in capsys.readouterr().out
    again = Run.open("out")
    assert (again.finished, again.state) == (True, "2 of 2 steps")
    shutil.rmtree("out/model")  # as a kill after the checkpoint leaves it
    assert timeless(GSPOAgent.resume("out").train()) == timeless(whole)


def test_a_success_that_no_evaluation_could_show_is_refused(folder, capsys):
    said = refused(capsys, "train", "--stop-at-success", "0.5", "--eval-every", "0")
    assert "stop_at_success is 0.5 and eval_every is 0" in said
    said = refused(capsys, "compare", "--arm", "stop_at_success=0.5,0", "--seeds", "8")
    assert "stop_at_success is 0.5 in arm '0.5', whose last step" in said


def test_a_strangers_mixture_is_data(folder, capsys):
    agent = GSPOAgent(config=mixed(env_kwargs={"last": {"bonus": 0.25}}))
    agent.save("theirs")
    assert read_saved("theirs").untrusted == {}  # the user's own record
    for note in (folder / "state").rglob("*.json"):
        note.unlink()
    with (folder / "two.py").open("a") as file:
        file.write("\nopen('proof', 'w').close()\n")
    saved = read_saved("theirs")
    assert saved.untrusted == {"env": ["two.py:Turns:3", "last=two.py:Last:1"]}
    said = refused(capsys, "evaluate", "--model", "theirs")
    assert "--env two.py:Turns:3 last=two.py:Last:1" in said
    assert not (folder / "proof").exists()
    main(["evaluate", "--model", "theirs", "--env", "two.py:Turns:3", "last=two.py:Last:1"])
    assert "in last (" in capsys.readouterr().out


def test_the_weights_draw_the_environments_and_one_environment_draws_as_before():
    tasks = draw_tasks({"a": 0.7, "b": 0.3}, seed=5, step=2, count=4000)
    share = sum(task.env_id == "a" for task in tasks) / 4000
    assert abs(share - 0.7) < 0.03
    assert tasks == draw_tasks({"a": 7, "b": 3}, seed=5, step=2, count=4000)
    assert tasks != draw_tasks({"a": 0.7, "b": 0.3}, seed=5, step=3, count=4000)
    seeds = [derive_seed("task", 5, 2, p) % HELD_OUT for p in range(4)]
    alone = draw_tasks({"x": 1.0}, seed=5, step=2, count=4, options={"hops": 2})
    assert alone == [Task(env_id="x", seed=seed, options={"hops": 2}) for seed in seeds]


def test_the_first_tasks_of_a_joint_split_are_of_every_environment():
    def split(name, count):
        tasks = tuple(Task(env_id=name, seed=HELD_OUT + n) for n in range(count))
        held = {name: frozenset({"1"})}
        return Split(tasks=tasks, keys=("1",) * count, held_out=held, num_tasks=5)

    joint = join([split("a", 9), split("b", 3)])
    assert [t.env_id for t in joint.first(4).tasks].count("b") == 1
    assert (joint.num_tasks, joint.distinct) == (10, 2)
    assert str(joint) == "a: 9 episodes of 1 held-out task; b: 3 episodes of 1 held-out task"
    assert str(joint.first(4)) == "a: 3 episodes of 1 held-out task; b: 1 held-out task"
    played = bare_episode(Task(env_id="b", seed=0), [1], [0.0])
    assert not joint.holds_out(played)
