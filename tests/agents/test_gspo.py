"""The agent end to end: the same seed gives the same run, and a saved agent can be loaded."""

import asyncio
import dataclasses

import gymnasium
import pytest
import torch
from support import runs
from support.cli_errors import refused
from support.runs import timeless
from transformers import AutoModelForCausalLM

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.main import main
from gspo_env.config import Config
from gspo_env.env.info import read_prompt
from gspo_env.env.registration import make_env
from gspo_env.episodes import read_episodes, render_episode
from gspo_env.errors import ConfigError, RolloutError
from gspo_env.model import add_adapter
from gspo_env.model.load import has_adapter
from gspo_env.recipes.tiny import Tiny
from gspo_env.registry import find

pytestmark = pytest.mark.usefixtures("in_folder")


def tiny(**changes):
    config = runs.tiny(steps=3, eval_every=2, eval_tasks=8)
    return dataclasses.replace(config, **changes)


SHORT = Tiny(hidden_size=32, demonstrations=64, imitation_steps=10)


BREAKS = '''
from support.small_env import Shown

class Breaks(Shown):
    """Works in the demonstrations and in the evaluation, and fails in training."""
    num_tasks = 1
    broken = False

    def reset(self, *, seed=None, options=None):
        if seed < 10**9 and self.broken:
            raise ConnectionError("the server is gone")
        return super().reset(seed=seed)
'''


def test_too_many_failures_stop_the_run_and_the_first_traceback_is_kept(tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS)
    agent = GSPOAgent(env=f"{tmp_path}/breaks.py:Breaks", config=tiny(output="run"))
    type(next(iter(agent.environments.envs.values())).unwrapped).broken = True
    with pytest.raises(RolloutError, match=r"16 of 16 .*gone \(breaks.py:\d+ in reset\)"):
        agent.train()
    kept = (tmp_path / "run" / "first-environment-error.txt").read_text()
    assert "ConnectionError: the server is gone" in kept
    assert 'raise ConnectionError("the server is gone")' in kept


def test_a_run_names_its_metrics_and_its_folder_loads_with_transformers_alone():
    agent = GSPOAgent(config=with_learner(tiny(), lora_rank=2, learning_rate=1e-2))
    history = agent.train()
    assert [step for step, m in history if "eval/success" in m] == [0, 2, 3]
    every = set().union(*(m for _, m in history))
    assert every >= {
        *("train/loss", "train/ratio", "train/ratio_min", "train/ratio_max"),
        *("train/clipped_fraction", "train/entropy", "train/grad_norm", "rollout/return"),
        *("rollout/outcome", "rollout/success", "rollout/turns", "train/tokens_per_second"),
        *("eval/success", "eval/success_greedy", "eval/return", "eval/turns"),
        *("rollout/tokens", "rollout/tokens_per_second", "rollout/zero_variance_groups"),
        *("train/logprob_diff_mean", "train/logprob_diff_p99", "train/logprob_diff_max"),
        *("rollout/stop/terminated", "rollout/env_errors"),
        *("time/rollout", "time/update", "time/sync", "time/eval"),
    }
    assert all(m.get("train/logprob_diff_max", 0.0) < 1e-4 for _, m in history)
    assert "train/sync_logprob_diff" not in every  # the engine has no copy that could differ
    assert has_adapter(agent.folder / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(agent.folder / "model")
    agent.model.get_base_model().set_attn_implementation("sdpa")
    ids = torch.tensor([[5, 9, 300, 20]])
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(ids).logits, agent.model(ids).logits, rtol=1e-4, atol=1e-5
        )


class Losses:
    """Keeps the losses that a warm-up shows."""

    def __init__(self):
        self.seen = []

    def update(self, phase, step, total, loss):
        self.seen.append(loss)

    def when_slow(self, seconds=2.0):
        return lambda *_, **numbers: None


def with_learner(config, **changes):
    return dataclasses.replace(config, learner=dataclasses.replace(config.learner, **changes))


@pytest.mark.slow
def test_the_warm_up_trains_every_weight_and_the_adapter_comes_after_it():
    plain, lora = Losses(), Losses()
    config = tiny(steps=1, eval_tasks=2, recipe=SHORT)
    GSPOAgent(config=config).warm_up(plain)
    agent = GSPOAgent(config=with_learner(config, lora_rank=2))
    agent.warm_up(lora)
    assert lora.seen == plain.seen
    agent.play(5)  # starts an engine with the model as it is
    before = {name: p.clone() for name, p in agent.model.named_parameters()}
    history = agent.train()
    after = dict(agent.model.get_base_model().named_parameters())
    for name, weight in before.items():
        owner, _, leaf = name.rpartition(".")
        assert torch.equal(weight, after.get(name, after.get(f"{owner}.base_layer.{leaf}")))
    assert any("lora_B" in name for name in after)
    assert all(m.get("train/logprob_diff_max", 0.0) < 1e-4 for _, m in history)


def test_settings_that_are_no_config_are_refused():
    with pytest.raises(ConfigError, match=r"config is \{'steps': 3\}; expected a gspo_env\.Config"):
        GSPOAgent(env="gspo/Lookup-v0", config={"steps": 3})


def test_an_adapter_for_an_adapted_model_is_refused(model, tokenizer):
    adapted = add_adapter(model, 2)
    config = with_learner(Config(model="given", tracker=find("tracker", "none")()), lora_rank=2)
    with pytest.raises(ConfigError, match="lora_rank is 2 and the model has an adapter"):
        GSPOAgent(adapted, config=config, tokenizer=tokenizer)


def test_save_and_load_give_an_agent_that_acts_the_same(tmp_path):
    agent = GSPOAgent(config=tiny())
    agent.save(tmp_path / "kept")
    again = GSPOAgent.load(tmp_path / "kept")
    env = make_env(agent.env_id)
    observation, _ = env.reset(seed=1)
    prompt = read_prompt(env)
    assert agent.act(observation, prompt=prompt) == again.act(observation, prompt=prompt)
    assert agent.act("oak", role="tool") == again.act("oak", role="tool")
    mine, theirs = (a.evaluate(tasks=4, samples=2) for a in (agent, again))
    for one, other in zip(mine, theirs, strict=True):
        assert [e.sequences[0].token_ids.tolist() for e in one.episodes] == [
            e.sequences[0].token_ids.tolist() for e in other.episodes
        ]


def test_act_answers_as_an_episode_of_the_same_task_does():
    agent = GSPOAgent(config=tiny())
    with pytest.raises(ConfigError, match="act has no conversation"):
        agent.act("hello")
    agent.warm_up()
    episode = agent.play(5)
    assert episode.turns
    env = make_env(agent.env_id)
    observation, _ = env.reset(seed=5)
    prompt = read_prompt(env)
    for turn in episode.turns:
        assert agent.act(observation, prompt=prompt, role=turn.role) == turn.text
        prompt, observation = None, env.step(turn.text)[0]


def use(agent):
    """Every method that plays; in a notebook, cells are run by an event loop."""
    history = agent.train()
    episode = agent.play(7)
    (group,) = agent.evaluate(1, samples=2)
    first = group.episodes[0]
    acted = agent.act(first.turns[0].observation, prompt=first.prompt)
    agent.close()
    texts = [turn.text for e in (episode, *group.episodes) for turn in e.turns]
    return timeless([*history, (0, agent.metrics())]), texts, acted


@pytest.mark.slow
def test_the_same_seed_does_the_same_also_in_a_notebook_whose_event_loop_runs():
    async def cell():
        return use(GSPOAgent(config=tiny(steps=2, seed=3)))

    first, other = (use(GSPOAgent(config=tiny(steps=2, seed=seed))) for seed in (3, 4))
    assert asyncio.run(cell()) == first
    assert first[0] != other[0]


YES = """
from support.small_env import Small

class Yes(Small):
    first = "Say yes."

    def reward(self, action):
        return float(action.strip() == "yes")

    def expert_action(self, noise=0.0):
        return "yes" if self.np_random.random() < 0.5 else "no"
"""


def check_played(agent, folder):
    """Checks that what `play` returns is what the run keeps of such an episode."""
    kept = read_episodes(folder, phases="greedy")[0]
    played = agent.play(kept.seed)
    assert type(played) is type(kept)
    assert (played.phase, played.step, played.seed) == ("greedy", 1, kept.seed)
    assert {turn.weights_version for turn in played.turns} == {1}
    assert played.total_reward == sum(turn.reward for turn in played.turns)
    assert render_episode(played).startswith(f"== custom/Yes-v0, seed {kept.seed} ==")


def test_the_environment_of_a_run_may_be_a_class_that_a_file_has_later(tmp_path, capsys):
    names = {"__name__": "__main__"}
    exec(YES, names)
    agent = GSPOAgent(env=names["Yes"], config=tiny(steps=1))
    assert [step for step, _ in agent.train()] == [0, 1, 1]
    check_played(agent, agent.folder)
    check_played(GSPOAgent.load(agent.folder), agent.folder)
    assert isinstance(next(iter(agent.environments.envs.values())).unwrapped, names["Yes"])
    with pytest.raises(ConfigError, match=r"of type Yes; expected an id, FILE"):
        GSPOAgent(env=names["Yes"](), config=tiny())
    del gymnasium.registry["custom/Yes-v0"]  # as in another process
    said = refused(capsys, "evaluate", str(agent.folder))
    assert "expected the file of its class, FILE.py:Yes" in said
    (tmp_path / "yes.py").write_text(YES)
    main(["evaluate", str(agent.folder), "--env", "yes.py:Yes"])
    main(["train", "--resume", str(agent.folder), "--env", "yes.py:Yes", "--steps", "2"])
    assert "train 2/2" in capsys.readouterr().out


def test_a_model_in_hand_is_trained_where_it_is(player):
    import copy

    model = copy.deepcopy(player.model)
    before = copy.deepcopy(model.state_dict())
    learner = dataclasses.replace(tiny().learner, learning_rate=1e-2)
    config = tiny(steps=1, learner=learner)
    agent = GSPOAgent(model, player.env_id, config, tokenizer=player.tokenizer)
    agent.train()
    assert agent.model is model
    assert any(not torch.equal(before[k], v) for k, v in model.state_dict().items())


MASKED = """
from support.small_env import Shown

class Masked(Shown):
    \"\"\"No sampled token may be trained on.\"\"\"
    def step(self, action):
        tokens = getattr(action, "token_ids", ())
        return "", 1.0, True, False, {"token_mask": [False] * len(tokens)}
"""


def test_a_step_without_a_token_to_train_on_is_skipped_and_the_run_goes_on(tmp_path, in_folder):
    (tmp_path / "masked.py").write_text(MASKED)
    config = runs.tiny(
        env="masked.py:Masked",
        credit={"train_on_truncated": False},  # an action that was cut has no mask
    )
    history = GSPOAgent(config=config).train()
    assert [step for step, _ in history] == [0, 1, 2, 2]
    assert all("train/loss" not in metrics for _, metrics in history)
