"""A model that is named imitates what a teacher plays, whole or with its adapter."""

import re
from dataclasses import replace

import pytest
from support.cli_errors import refused
from support.half import SMALL, train_half
from support.runs import timeless
from support.talks import write

from gspo_agents.gspo import GSPOAgent
from gspo_env.chat import ChatTokenizer
from gspo_env.cli.main import parse
from gspo_env.compare import Comparison, compare, grid, planned
from gspo_env.config import from_dict, override
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, TrainingError
from gspo_env.recipes import Imitate
from gspo_env.recipes.build import TEMPLATE, build_tokenizer, imitation_samples
from gspo_env.recipes.teacher import in_format, training_tasks
from gspo_env.rollout.play import demonstrator, play_now
from gspo_env.runs import Run
from gspo_env.tools.calls import parse_tool_calls
from gspo_env.tracking.base import NoTracker
from gspo_env.tracking.console import Progress
from gspo_env.types import Task


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The folder of a model that says yes half of the time, and the file of its environment."""
    return train_half(tmp_path_factory.mktemp("half"))


def config(half, output, env="Shown", rank=0, **recipe):
    steps = {"demonstrations": 64, "imitation_steps": 12, "imitation_learning_rate": 1e-2}
    tree = {
        **SMALL,
        "model": f"{half}/model",
        "env": f"{half}/yes.py:{env}",
        "recipe": {"name": "imitate", **steps, **recipe},
        "learner": {"learning_rate": 1e-9, "lora_rank": rank},
        "output": str(output),
    }
    return from_dict(tree)


@pytest.mark.parametrize(
    ("teacher", "rank"), [("expert", 8), ("self", 0), ("model", 8), ("conversations", 0)]
)
def test_a_model_imitates_the_successes_of_a_teacher_and_its_run_resumes(
    half, tmp_path, teacher, rank, capsys
):
    name = f"{half}/model" if teacher == "model" else teacher
    recipe = {"teacher": name}
    if teacher == "conversations":
        answer = {"role": "assistant", "content": "yes"}
        asked = [{"role": "user", "content": f"Say yes, {n}."} for n in range(9)]
        talks = [{"messages": [question, answer]} for question in asked]
        recipe = {"conversations": write(tmp_path / "talks.jsonl", *talks)}
    settings = config(half, tmp_path / "run", rank=rank, **recipe)
    agent = GSPOAgent(config=settings)
    agent.train()
    assert hasattr(agent.model, "disable_adapter") == bool(rank)
    wins = [e.success for group in agent.evaluate(samples=16) for e in group.episodes]
    assert sum(wins) >= 0.9 * len(wins)
    resumed = GSPOAgent.resume(tmp_path / "run", replace(settings, steps=2))
    assert [step for step, _ in resumed.train()][-1] == 2  # from the same weights
    (shipped,) = Run.open(tmp_path / "run").series["eval/success_as_shipped"].values
    assert shipped < 0.9
    for line in [line for line in capsys.readouterr().out.splitlines() if "as shipped" in line]:
        assert re.search(rf": {shipped:.1%} as shipped, [\d.]+% after imitation, [\d.]+% aft", line)
    assert f", {shipped:.1%} as shipped, " in (tmp_path / "run" / "summary.md").read_text()
    assert resumed.metrics()["eval/success"] >= 0.9


def test_a_run_that_continues_a_model_that_has_imitated_does_not_imitate_again(half, tmp_path):
    agent = GSPOAgent(config=config(half, tmp_path / "run"))
    agent.train()
    for flags, steps in ([], 0), (["--imitation-steps", "3"], 3):
        again = parse(["train", "--model", str(tmp_path / "run"), *flags]).resolved
        assert again.recipe.imitation_steps == steps
        assert again.recipe.demonstrations == agent.config.recipe.demonstrations


@pytest.mark.parametrize("rank", [0, 8])
def test_a_run_from_a_saved_start_equals_the_run_that_imitates_itself(half, tmp_path, rank):
    settings = override(
        config(half, tmp_path / "one", rank=rank), {"learner": {"learning_rate": 1e-3}}
    )
    GSPOAgent(config=settings).save_start(tmp_path / "start", Progress())
    one = GSPOAgent(config=settings).train()
    assert one[0][1].pop("eval/success_as_shipped") < 0.9  # only the run that imitates measures it
    other = override(settings, {"output": str(tmp_path / "other")})
    assert timeless(GSPOAgent.from_start(tmp_path / "start", other).train()) == timeless(one)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 8])
def test_all_arms_of_a_comparison_start_from_one_imitation_of_the_model(half, tmp_path, rank):
    problem = override(config(half, "", rank=rank), {"learner": {"learning_rate": 1e-3}})
    comparison = Comparison(
        problems={"one": problem},
        arms=grid({"gamma": [0.0, 1.0], "learning_rate": [1e-3, 1e-2]})[:3],
        seeds=2,
        workers=1,
    )
    said = []
    results = compare(comparison, tmp_path / "out", NoTracker(), said.append)
    assert "6 runs to play, warm-ups before: 2, 1 at a time" in said
    assert not [r.error for r in results if r.error]
    firsts = {r.run.seed: [] for r in results}
    for result in results:
        values = {
            name: s.values[0] for name, s in result.recorded.series.items() if s.steps[0] == 0
        }
        firsts[result.run.seed].append(timeless([(0, values)]))
    assert all(first == same[0] for same in firsts.values() for first in same)
    assert len(list((tmp_path / "out/starts").iterdir())) == 2


def test_arms_that_change_the_adapter_that_imitates_have_a_start_of_their_own(half, tmp_path):
    problem = config(half, "", rank=8)
    arms = grid({"lora_alpha": [0.0, 4.0], "lora_targets": ["all-linear", "q_proj"]})
    comparison = Comparison(problems={"one": problem}, arms=arms, seeds=1)
    assert len({run.start for run in planned(comparison, tmp_path)}) == 4
    plain = override(problem, {"recipe": {"imitation_steps": 0}})
    (start,) = {r.start for r in planned(replace(comparison, problems={"one": plain}), tmp_path)}
    assert start is None


def test_no_task_of_the_evaluation_is_demonstrated(half, tmp_path):
    agent = GSPOAgent(config=config(half, tmp_path))
    held_out = agent.split().held_out
    tasks = training_tasks(0, agent.environments.envs, held_out, 32)
    assert len(tasks) == 32
    keys = {str(task.seed % 9) for task in tasks}
    assert not keys & held_out[agent.env_id]


@pytest.mark.parametrize(
    ("env", "recipe", "error", "match"),
    [
        ("Yes", {}, ConfigError, r"has no expert_action to imitate; expected --teacher self"),
        ("Yes", {"teacher": "self", "min_reward": 2.0}, TrainingError, "reward of at least 2"),
    ],
)
def test_a_teacher_with_nothing_to_imitate_is_an_error(half, tmp_path, env, recipe, error, match):
    with pytest.raises(error, match=match):
        GSPOAgent(config=config(half, tmp_path / "run", env, **recipe)).train()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ({"teacher": "self", "conversations": "c.jsonl"}, "expected one of them to imitate"),
        ({"teacher": "self", "slips": 0.1}, "slips is 0.1, and no expert plays"),
        ({"conversations": "c.jsonl", "slips": 0.1}, "slips is 0.1, and no expert plays"),
    ],
)
def test_settings_of_another_teacher_are_refused(recipe, match):
    with pytest.raises(ConfigError, match=match):
        Imitate(**recipe)


def test_a_recipe_that_builds_a_model_takes_none(half, capsys):
    said = refused(capsys, "train", "--recipe", "tiny", "--model", str(half / "model"))
    assert "recipe is 'tiny', which builds a model" in said


LLAMA = TEMPLATE.replace("<tool_call>", "<|python_tag|>").replace("</tool_call>", "")
LLAMA = LLAMA.replace('"arguments"', '"parameters"')


def test_a_demonstrated_call_has_the_form_of_the_models_own_template():
    tokenizer = build_tokenizer(["lookup key"])
    tokenizer.add_tokens(["<|python_tag|>"], special_tokens=True)
    tokenizer.chat_template = LLAMA
    chat, env_id = ChatTokenizer(tokenizer), "gspo/Lookup-v0"
    episode = play_now(make_env(env_id), Task(env_id=env_id, seed=1), demonstrator())
    again = in_format(episode, chat)
    first, tools = again.turns[0].text, episode.prompt.tools
    assert first.startswith('<|python_tag|>{"name": "lookup", "parameters": {"key": ')
    (call,) = parse_tool_calls(first, tools)
    assert [call] == parse_tool_calls(episode.turns[0].text, tools)
    (sample,) = imitation_samples([again], chat)
    calls = len(episode.turns) - 1
    assert list(sample.token_ids).count(tokenizer.convert_tokens_to_ids("<|python_tag|>")) == calls
