"""Imitation within the steps of a policy loss: its gradient, whose episodes it has, refusals."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.learners import adapted, learner_of
from support.runs import drawn, tiny, write_env

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.main import main
from gspo_env.config import Config, override
from gspo_env.episodes import read_episodes
from gspo_env.errors import ConfigError, OutputError
from gspo_env.health.startup import check_config
from gspo_env.learner import GSPO, LearnerConfig
from gspo_env.training.interleaved import Interleaved

SUPPORT = Path(__file__).parents[1] / "support"
SHOWN = [
    [[[5, 6, 7, 8], [-1, -1, 0, 0]], [[5, 6, 9], [-1, -1, 1]]],
    [[[11, 12, 13], [-1, 0, -1]]],
]
"""Two episodes of token ids and turns, the first of which has two sequences: 4 tokens."""


@pytest.fixture(autouse=True)
def _folder(tmp_path, in_folder):
    for name in ("drawn_envs.py", "small_env.py"):
        shutil.copy(SUPPORT / name, tmp_path)


def interleaved(learner, episodes, **settings):
    config = LearnerConfig(**{"imitation": "kept", "imitation_coef": 0.3, **settings})
    imitation = Interleaved(config, learner)
    imitation.restore({"episodes": episodes, "kept": []})
    return imitation


def cross_entropy(model, temperature):
    """The mean over the four imitated tokens, by the model's own logits."""
    total = 0.0
    for ids, turns in (sequence for episode in SHOWN for sequence in episode):
        logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
        logprobs = torch.log_softmax(logits, -1)
        places = [t for t in range(1, len(ids)) if turns[t] >= 0]
        total = total - sum(logprobs[t - 1, ids[t]] for t in places)
    return total / 4


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("tokens", [10_000, 8])
def test_the_gradient_is_the_policys_and_the_weighted_cross_entropy_of_the_shown_tokens(
    model, samples, gradients, tokens, lora
):
    def made():
        base = adapted(model) if lora else model
        config = {"dtype": torch.float64, "microbatch_tokens": tokens, "temperature": 0.7}
        return learner_of(base, **config)

    plain, _ = gradients(made(), samples)
    learner = made()
    imitation = interleaved(learner, SHOWN)
    both, _ = gradients(learner, samples)
    own = made().policy
    own.set_attn_implementation("sdpa")
    loss = cross_entropy(own, 0.7)
    (0.3 * loss).backward()
    grads = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
    assert plain.keys() == both.keys() == grads.keys()
    for name in plain:
        torch.testing.assert_close(both[name], plain[name] + grads[name], rtol=1e-6, atol=1e-9)
    assert imitation.metrics() == {
        "train/imitation_episodes": 2.0,
        "train/imitation_loss": pytest.approx(loss.item(), rel=1e-6),
    }


def test_a_uniform_policy_has_the_loss_log_v_in_each_step_of_an_update(model, samples):
    flat = copy.deepcopy(model)
    for weight in flat.parameters():
        weight.data.zero_()
    learner = learner_of(flat, minibatches=3, learning_rate=1e-12)
    imitation = interleaved(learner, SHOWN)
    learner.update(samples)
    size = flat.config.vocab_size
    assert imitation.metrics()["train/imitation_loss"] == pytest.approx(np.log(size), rel=1e-6)


def test_without_episodes_an_update_has_the_bits_of_one_that_imitates_nothing(model, samples):
    runs = []
    for shown in (None, [], [[]]):
        learner = learner_of(model, GSPO(), learning_rate=1e-2)
        if shown is not None:
            interleaved(learner, shown)
        learner.update(samples)
        runs.append(list(learner.policy.parameters()))
    assert all(map(torch.equal, runs[0], runs[1]))
    assert all(map(torch.equal, runs[0], runs[2]))


def shown_texts(agent, step):
    """The texts of the episodes that an update imitated, and of those that are kept after it."""
    file = agent.folder / f"checkpoints/step-{step:06d}/state.json"
    state = json.loads(file.read_text())["interleaved"]
    decode = agent.tokenizer.decode
    return tuple([decode(e[0][0]) for e in state[name]] for name in ("episodes", "kept"))


def train(**settings):
    base = {"checkpoints": {"save_every": 1, "keep": 9}, "output": "run", "tasks_per_step": 5}
    config = override(drawn(**base), {"episodes": {"keep_episodes": "all"}, **settings})
    agent = GSPOAgent(config=config)
    return agent, agent.train()


def tasks_of(texts):
    return {text.partition("task ")[2].split("<")[0].strip() for text in texts}


def test_the_expert_plays_the_tasks_of_the_update_none_of_which_is_held_out():
    agent, history = train(learner={"imitation": "expert", "imitation_episodes": 3})
    held = {str(key) for keys in agent.split().held_out.values() for key in keys}
    assert held
    for step in (1, 2, 3):
        shown, kept = shown_texts(agent, step)
        played = read_episodes("run", phases=("train",), steps=(step,))
        assert len(shown) == 3
        assert not kept
        assert tasks_of(shown) <= {record.task_key for record in played} - held
    losses = [m["train/imitation_loss"] for _, m in history if "train/imitation_loss" in m]
    assert len(losses) == 3
    assert all(loss > 0 for loss in losses)


def test_kept_are_the_newest_successes_of_earlier_updates_one_of_a_group():
    agent, history = train(learner={"imitation": "kept", "imitation_episodes": 3})
    episodes = [m["train/imitation_episodes"] for _, m in history if "train/loss" in m]
    before = []
    for step, count in enumerate(episodes, 1):
        shown, kept = shown_texts(agent, step)
        assert shown == before
        assert len(shown) == count
        assert len(kept) <= 3
        assert all("yes" in text for text in kept)
        before = kept
    assert episodes[0] == 0 < episodes[-1]


def test_a_run_with_stale_episodes_imitates_too():
    settings = {"imitation": "expert", "imitation_episodes": 2, "minibatches": 2}
    _agent, history = train(learner=settings, supply={"max_staleness": 2})
    assert [m["train/imitation_episodes"] for _, m in history if "train/loss" in m] == [2.0] * 3


def test_a_kept_batch_is_replayed_with_its_demonstrations(capsys):
    keep = {"keep_episodes": "all", "keep_batches": "all"}
    train(learner={"imitation": "expert", "imitation_episodes": 2}, episodes=keep)
    main(["replay", "run", "--step", "2"])
    assert "to the last digit" in capsys.readouterr().out
    config = override(GSPOAgent.replay("run").own, {"learner": {"imitation_episodes": 1}})
    with pytest.raises(ConfigError, match="imitation_episodes"):
        GSPOAgent.replay("run", config=config)


def test_a_batch_of_a_run_that_imitated_nothing_refuses_to_imitate():
    train(episodes={"keep_episodes": "all", "keep_batches": "last"})
    config = override(GSPOAgent.replay("run").own, {"learner": {"imitation": "expert"}})
    with pytest.raises(OutputError, match="the run has kept no demonstrations"):
        GSPOAgent.replay("run", config=config).update()


def write_rows(*completions):
    """A dataset, some of whose rows have an answer, and a reward for each completion."""
    rows = [{"prompt": f"Say {n}.", "completion": text} for n, text in enumerate(completions)]
    lines = [json.dumps({k: v for k, v in row.items() if v}) for row in rows]
    Path("rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    Path("paid.py").write_text("def paid(a):\n    return float('yes' in a.text)\n")
    rewards = {"data": "rows.jsonl", "rewards": "paid.py:paid"}
    return {"env": "gspo/Dataset-v0", "env_kwargs": rewards}


@pytest.mark.parametrize("kind", ["no method", "no answer"])
def test_an_environment_without_an_expert_is_refused_before_anything_is_played(kind):
    write_env(Path("own.py"), "return 'go on', 1.0, True, False, {}")
    env = {"env": "own.py:Own"} if kind == "no method" else write_rows("", "", "", "")
    config = tiny(**env, learner={"imitation": "expert"})
    with pytest.raises(ConfigError, match=r"-v0 has no expert \(.*\); expected --imitation kept"):
        GSPOAgent(config=config)


def test_tasks_to_which_the_expert_has_no_answer_are_left_out():
    env = write_rows(*(["yes", ""] * 8))
    learner = {"imitation": "expert", "imitation_episodes": 8}
    sizes = {"tasks_per_step": 8, "recipe": {"demonstrations": 2, "imitation_steps": 0}}
    history = GSPOAgent(config=tiny(**env, **sizes, learner=learner)).train()
    shown = [m["train/imitation_episodes"] for _, m in history if "train/imitation_episodes" in m]
    assert min(shown) > 0
    assert max(shown) < 8


def test_several_ranks_are_refused():
    config = Config(learner=LearnerConfig(imitation="kept"))
    with pytest.raises(ConfigError, match="imitation is 'kept' and several ranks train"):
        check_config(config, ranks=True)


@pytest.mark.parametrize("value", [0.0, -0.1, float("nan"), float("inf")])
def test_a_weight_that_adds_nothing_or_takes_away_is_refused(value):
    with pytest.raises(ConfigError, match="imitation_coef"):
        LearnerConfig(imitation="kept", imitation_coef=value)
