"""The look-up agents of the examples, trained through the real SDKs."""

import copy
import json
import shutil
from pathlib import Path

import pytest

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import Config
from gspo_env.recipes.base import Recipe
from gspo_env.registry import load_module
from gspo_env.types import Task

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
TASKS = load_module(str(EXAMPLES / "lookup_tasks.py"))
STUDY = load_module(str(Path(__file__).parents[1] / "support" / "forms.py"))
FORMS = STUDY.FORMS
pytestmark = pytest.mark.agents
forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def kwargs(form, tmp_path):
    """The arguments of the environment of one of the forms."""
    if form == "node" and shutil.which("node") is None:
        pytest.skip("node is not installed")
    tasks = tmp_path / "lookup.jsonl"
    tasks.write_text("".join(f"{json.dumps(TASKS.make_task(n))}\n" for n in range(40)))
    rewards = [f"{EXAMPLES / 'lookup_tasks.py'}:{name}" for name in ("right", "hops")]
    return {"data": str(tasks), "rewards": rewards, "success": 1.0, "max_turns": 8, **FORMS[form]}


@forms
def test_an_agent_plays_the_native_episode_id_by_id(form, kwargs, player):
    played = []
    native = f"{STUDY.__file__}:Native", {"data": kwargs["data"]}
    for env, arguments in (native, ("gspo/Program-v0", kwargs)):
        settings = {"env": env, "env_kwargs": arguments, "tracker": "none"}
        config = Config.from_recipe(Recipe(), rollout=STUDY.LIMITS, **settings)
        agent = GSPOAgent(player.model, config=config, tokenizer=player.tokenizer)
        tasks = [Task(env_id=agent.env_id, seed=n, options={"row": n}) for n in range(6)]
        played.append([e for group in agent.evaluate(tasks, 2) for e in group.episodes])
        agent.close()
    for one, two in zip(*played, strict=True):
        assert STUDY.ids(one) == STUDY.ids(two)
        assert one.rewards == pytest.approx(two.rewards)
        assert (one.success, one.stop_reason) == (two.success, two.stop_reason)


@pytest.mark.parametrize("form", ["openai", "node"])
def test_two_steps_of_training(form, kwargs, player, in_folder):
    env = {"env": "gspo/Program-v0", "env_kwargs": kwargs, "tracker": "none"}
    rollout = {"group_size": 2, **STUDY.LIMITS}
    counts = {"steps": 2, "tasks_per_step": 2, "eval_every": 0, "eval_tasks": 2}
    config = Config.from_recipe(Recipe(), rollout=rollout, **env, **counts)
    agent = GSPOAgent(copy.deepcopy(player.model), config=config, tokenizer=player.tokenizer)
    metrics = [m for _, m in agent.train() if "train/loss" in m]
    assert len(metrics) == 2
    assert all(m["rollout/env_errors"] == m["rollout/env_timeouts"] == 0 for m in metrics)
    assert all(m["train/logprob_diff_max"] < 1e-4 for m in metrics)
    agent.close()
