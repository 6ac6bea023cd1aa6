"""Compares with TRL's GRPO trainer: an update, the rollout, and the time until the agent is good.

    pip install --no-deps --target DIR "trl==1.16.*" "datasets<5" xxhash multiprocess dill \
        httpx httpcore jinja2
    python benchmarks/against_trl.py update DIR [--model smollm2 --groups 1 --shared 300 --rounds 1]
        [--dtype bfloat16] [--only ours|bare|trl|compact [--lora 16]]
    python benchmarks/against_trl.py rollout DIR [--model smollm2] [--rounds 5] [--start FOLDER]
    python benchmarks/against_trl.py success DIR [--seeds 3] [--steps 30] [--goals 0.8 0.9]
    python benchmarks/against_trl.py success DIR --model smollm2 --seeds 2 --steps 12 --goals 0.9 \
        --patience 9
    python benchmarks/against_trl.py success DIR --model telecom --seeds 1 --steps 8 --goals 0.3 \
        --arms "ours, outcome" TRL

`update`: groups of eight episodes with a common prefix of 512 tokens, three turns and ragged
lengths. Both get the same token ids, masks, advantages and old log-probabilities, and use GSPO's
sequence ratio. TRL's loss, log-probability head and padding run as its trainer calls them
(left-padded prompts, right-padded completions, one group per microbatch), with the same gradient
clip and optimiser. Losses and gradients are compared first. TRL is timed as shipped, and with the
compact head that it uses on a GPU. Process CPU time, one thread; with a GPU, both run on it, and
the clock is read. With `--only`, one program runs alone, and the most memory that it took is
printed too. `bare` is the model itself, one episode at a time, so without padding; its loss is the
mean of the negative log-probabilities of the sampled tokens.

`success`: TRL's trainer and ours from the same warmed-up model. The task is the look-up
environment, the reward the return of an episode (0.2 a hop, 1 for the right answer), a step 32
tasks of 8 episodes and 4 minibatches, the loss GSPO's with the same clip range, learning rate and
gradient norm. With `--model smollm2`, it is the recipe `smollm2`: SmolLM2-135M works out stories
with a calculator, 8 tasks of 8 episodes and 2 minibatches a step; both continue the adapter that
has imitated, on the same tokens. With `--model telecom`, the tiny model plays the tasks of τ²-bench
without their rules, 16 tasks of 8 episodes a step; a malformed call ends an episode of TRL's, and
is answered in ours. `--output` keeps the weights of each step, for `gspo-env evaluate`. TRL plays
by its own environment interface (`environment_factory`) with `transformers`, as on any machine
without vLLM. Ours runs with credit by turn (the default) and with credit by outcome, which is what
TRL can express. Each training is a process of its own with one thread; arms take turns. A run has
reached a goal after the first step whose episodes and those of the two steps before it have that
mean success: training episodes, and for SmolLM2 two of each of 64 held-out tasks, which our engine
plays afterwards with the adapter of each step. Its time is the seconds of the process's processor
from the first step on; wall-clock seconds are printed too. `--patience` stops TRL after that
multiple of our longest time to the first goal.

`rollout`: the models and settings of `success`. Each call of TRL's rollout (`_generate`: no resets,
rewards and log-probabilities of the learner) is followed by one of ours, resets and the start of
our engine included. The rates are sampled tokens in a second of the processor, with one thread.
FOLDER has what `success` writes as `start`; without one it is made.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
from common import (
    CLIP,
    GROUP,
    TRAININGS,
    Training,
    alternate,
    cpu_seconds,
    device_seconds,
    make_model,
    make_start,
    multi_turn_group,
    show,
    start_agent,
)

from gspo_env.batch.sample import Sample
from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.model.adapters import add_adapter
from gspo_env.types import Task

AT_ONCE = 8
"""Episodes that TRL's update of a real model holds in memory."""
ARMS = {"ours, turns": "returns_to_go", "ours, outcome": "outcome", "TRL": ""}
"""The estimator of each of ours."""
PROGRAMS = {
    "ours": "ours",
    "trl": "TRL as shipped",
    "compact": "TRL with its compact head",
    "bare": "the model itself",
}


class Peer:
    """The loss of TRL with a separate model, optimiser and padded batches."""

    def __init__(self, model, groups: list[list[Sample]], prompt: int) -> None:
        from accelerate import Accelerator
        from trl import GRPOTrainer
        from trl.trainer.utils import add_fused_lm_head

        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation("sdpa")
        add_fused_lm_head(self.model, temperature=1.0, outputs=("log_probs", "entropy"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-9, weight_decay=0.0)
        self.batches = [
            {name: t.to(self.model.device) for name, t in _padded(group, prompt).items()}
            for group in groups
        ]
        self.loss = GRPOTrainer._compute_loss
        self.trainer = types.SimpleNamespace(
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level="sequence",
            beta=0.0,
            loss_type="grpo",
            epsilon_low=CLIP[0],
            epsilon_high=CLIP[1],
            args=types.SimpleNamespace(delta=None),
            use_vllm=False,
            vllm_importance_sampling_correction=False,
            model=self.model,
            current_gradient_accumulation_steps=len(groups),
            accelerator=Accelerator(cpu=not torch.cuda.is_available()),
            _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        )
        scores = GRPOTrainer._get_per_token_logps_and_entropies
        self.trainer._get_per_token_logps_and_entropies = types.MethodType(scores, self.trainer)

    def backward(self) -> float:
        """Computes the loss of all batches and its gradients."""
        self.model.train()
        total = 0.0
        for batch in self.batches:
            loss = self.loss(self.trainer, self.model, batch)
            self.trainer.accelerator.backward(loss)
            total += float(loss.detach())
        return total

    def update(self) -> None:
        """Makes one optimiser step."""
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def bare_update(model, samples: list[Sample]):
    """Returns an optimiser step of the model itself, one episode at a time."""
    model = copy.deepcopy(model).train()
    model.set_attn_implementation("sdpa")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-9, weight_decay=0.0)

    def update() -> None:
        for sample in samples:
            ids, where = torch.tensor(sample.token_ids), torch.tensor(sample.mask).nonzero()[:, 0]
            logits = model(ids[None], logits_to_keep=where - 1).logits[0]
            loss = torch.nn.functional.cross_entropy(logits.float(), ids[where])
            (loss / len(samples)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def _padded(group: list[Sample], prompt: int) -> dict[str, torch.Tensor]:
    longest = max(len(s.token_ids) for s in group) - prompt

    def rows(per_sample, dtype):
        filled = [np.pad(v, (0, longest - len(v))) for v in per_sample]
        return torch.tensor(np.stack(filled), dtype=dtype)

    def spread(sample):
        values = np.zeros(len(sample.token_ids))
        values[sample.mask] = sample.engine_logprobs
        return values[prompt:]

    ids = torch.tensor(np.stack([s.token_ids[:prompt] for s in group]))
    return {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(ids),
        "completion_ids": rows([s.token_ids[prompt:] for s in group], torch.long),
        "completion_mask": rows([np.ones(len(s.token_ids) - prompt) for s in group], torch.long),
        "tool_mask": rows([s.mask[prompt:] for s in group], torch.float32),
        "advantages": torch.tensor([s.advantages[0] for s in group], dtype=torch.float32),
        "old_per_token_logps": rows([spread(s) for s in group], torch.float32),
    }


def with_real_logprobs(learner: Learner, groups: list[list[Sample]]) -> list[list[Sample]]:
    """Sets pi_old to the policy's log-probabilities plus noise."""
    rng = np.random.default_rng(1)

    def noisy(sample):
        policy = learner.logprobs(learner.pack([sample])).cpu().numpy().astype(np.float64)
        old = policy + rng.normal(0.05 * rng.normal(), 0.1, len(policy))
        return dataclasses.replace(sample, engine_logprobs=old)

    return [[noisy(s) for s in group] for group in groups]


def compare(learner: Learner, peer: Peer, samples: list[Sample]) -> None:
    """Prints the difference of losses and gradients; stops if it is too large."""
    (minibatch,) = learner.score(learner.prepare(samples))
    passes = learner.backward(minibatch)
    loss = sum(float(p.values["loss"]) for p in passes)
    clipped = torch.cat([p.values["clipped"] for p in passes]).float().mean()
    theirs = peer.backward()
    ours = learner.masters.tensors  # the weights themselves in float32
    expected = {n: p.grad for n, p in peer.model.named_parameters()}
    total = sum(float(g.float().square().sum()) for g in expected.values()) ** 0.5
    difference = (
        sum(float((ours[n].grad - g.float()).square().sum()) for n, g in expected.items()) ** 0.5
    )
    print(
        f"loss {loss:.7f} and {theirs:.7f}; gradients differ by {difference / total:.0e}"
        f" of their norm; {clipped:.0%} of tokens clipped"
    )
    # with SmolLM2, float32 moves gradients from float64's by 3e-4 in MKL and 8e-4 in oneDNN
    bound = 2e-3 if sum(p.numel() for p in peer.model.parameters()) > 5e6 else 1e-4
    exact = learner.policy.dtype is torch.float32  # rounding moves those of half precision by more
    if exact and (difference > bound * total or abs(loss - theirs) > 1e-5):
        raise SystemExit("the updates are not the same")
    learner.optimizer.zero_grad()
    peer.optimizer.zero_grad()


def run_update(arguments: argparse.Namespace) -> None:
    """Prints the seconds of each and how many times as fast ours is."""
    import trl
    from trl.trainer import utils

    model = make_model(arguments.model, arguments.dtype)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.lora:
        model = add_adapter(model, arguments.lora)
    rng, vocabulary = np.random.default_rng(0), model.config.vocab_size
    shape = {"shared": arguments.shared, "own": tuple(arguments.own), "vocabulary": vocabulary}
    groups = [multi_turn_group(rng, **shape) for _ in range(arguments.groups)]
    samples = [s for group in groups for s in group]
    if arguments.only == "bare":
        measure_alone(bare_update(model, samples), arguments)
        return
    config = LearnerConfig(minibatches=1, learning_rate=1e-9, warmup_steps=0)
    loss = GSPO(clip_low=CLIP[0], clip_high=CLIP[1], old_logprobs="engine")
    learner = Learner(copy.deepcopy(model), loss, config, total_steps=10**6)
    if arguments.only == "ours":
        measure_alone(lambda: learner.update(samples), arguments)
        return
    groups = with_real_logprobs(learner, groups)
    samples = [s for group in groups for s in group]
    peer = Peer(model, groups, arguments.shared)
    shipped = utils._use_triton

    def compact() -> None:
        utils._use_triton = lambda device: True
        try:
            peer.update()
        finally:
            utils._use_triton = shipped

    if arguments.only:
        del learner
        measure_alone(compact if arguments.only == "compact" else peer.update, arguments)
        return
    total = sum(len(s.token_ids) for s in samples)
    print(f"TRL {trl.__version__}; {len(samples)} episodes, {total} tokens")
    compare(learner, peer, samples)
    programs = {"ours": lambda: learner.update(samples), "trl": peer.update, "compact": compact}
    times = alternate(arguments.rounds, *(lambda p=p: device_seconds(p) for p in programs.values()))
    ours = show("ours", times[0], "s")
    for name, row in zip(("trl", "compact"), times[1:], strict=True):
        theirs = show(PROGRAMS[name], row, "s")
        print(f"  ours is {theirs / ours:.2f} times as fast (at least 4 expected)")


def measure_alone(update, arguments: argparse.Namespace) -> None:
    """Prints the seconds of an update, and the memory that it took beyond the model's."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (times,) = alternate(arguments.rounds, lambda: device_seconds(update))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    show(PROGRAMS[arguments.only], times, "s")
    print(f"  {peak / 2**20:.2f} GiB at most, {before / 2**20:.2f} GiB before")


class Enough(Exception):
    """All rounds have been played."""


def sampled(completions: list[list[int]], masks: list[list[int]] | None) -> int:
    """Returns how many tokens TRL's model has sampled; the others are the tools'."""
    if masks is None:
        return sum(map(len, completions))
    return sum(sum(mask) for mask in masks)


def run_rollout(arguments: argparse.Namespace) -> None:
    """Prints the rates and their ratio."""
    training, rounds = TRAININGS[arguments.model], arguments.rounds
    folder = Path(tempfile.mkdtemp(prefix="rollout-trl-"))
    start = Path(arguments.start or folder / "start")
    if not arguments.start:
        make_start(training, start)
    agent = start_agent(training, start, 0, eval_tasks=1)
    tasks = [Task(env_id=training.env_id, seed=n) for n in range(training.tasks)]
    trainer = theirs(training, start, folder / "steps.jsonl", 0, rounds + 1, float("inf"))
    generate, rates = trainer._generate, ([], [])

    def both(prompts: Any) -> Any:
        completions: list[Any] = []
        taken = cpu_seconds(lambda: completions.append(generate(prompts)))
        rates[0].append(sampled(completions[0][1], completions[0][2]) / taken)
        groups: list[Any] = []
        taken = cpu_seconds(lambda: groups.extend(agent.evaluate(tasks, GROUP, len(rates[0]))))
        rates[1].append(sum(e.model_tokens for g in groups for e in g.episodes) / taken)
        if len(rates[0]) > rounds:
            raise Enough
        return completions[0]

    trainer._generate = both
    with contextlib.suppress(Enough):
        trainer.train()
    show("TRL", rates[0][1:], "sampled tokens/s")
    show("ours", rates[1][1:], "sampled tokens/s")
    pairs = [own / other for other, own in zip(*(r[1:] for r in rates), strict=True)]
    print(f"ratio {median(pairs):.2f}")


class Clock:
    """Writes a line for each step: success, and seconds of the processor and of the wall."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.processor, self.wall = time.process_time(), time.perf_counter()

    def step(self, success: float, model: Any) -> float:
        """Notes that a step is done, and saves its weights; returns the processor's seconds."""
        processor, wall = time.process_time() - self.processor, time.perf_counter() - self.wall
        with self.path.open("a") as file:
            line = {"success": success, "processor": processor, "wall": wall}
            file.write(json.dumps(line) + "\n")
        start = self.path.parent / "start"
        weights = self.path.with_suffix(".steps") / str(len(self.path.read_text().splitlines()))
        model.save_pretrained(weights)
        for file in (*start.glob("tokenizer*"), *start.glob("*.jinja")):
            shutil.copy(file, weights)
        return processor


def ours(training: Training, start: Path, out: Path, seed: int, steps: int, advantage: str) -> None:
    """Trains with this package."""
    from gspo_env.training.loop import Loop

    output = str(out.with_suffix(".run"))
    settings = {"advantage": advantage, "steps": steps, "eval_tasks": 1, "output": output}
    agent = start_agent(training, start, seed, **settings)
    train_step, clocks = Loop._train_step, []

    async def timed(loop: Loop, *args: Any) -> None:
        if not clocks:
            clocks.append(Clock(out))
        await train_step(loop, *args)
        success = [m["rollout/success"] for _, m in loop.history if "rollout/success" in m]
        clocks[0].step(success[-1], agent.model)

    Loop._train_step = timed  # type: ignore[method-assign]
    agent.train()


def evaluate(training: Training, start: Path, out: Path) -> None:
    """Replaces the success of each step by that of its adapter in held-out tasks."""
    from gspo_env.model.adapters import load_adapter

    agent = start_agent(training, start, 0, eval_tasks=64)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    for step, line in enumerate(lines, 1):
        load_adapter(agent.model, out.with_suffix(".steps") / str(step))
        agent.close()
        groups = agent.evaluate(samples=2)
        line["training"] = line["success"]
        line["success"] = float(np.mean([e.success for g in groups for e in g.episodes]))
        print(f"{out.stem}: step {step}: {line['success']:.1%} of the held-out tasks", flush=True)
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))


def load_start(training: Training, start: Path) -> tuple[Any, Any]:
    """Loads the start for TRL; the template lists the tools in our order, TRL sorts them."""
    from peft import PeftModel

    from gspo_env.chat.tokenizer import ChatTokenizer
    from gspo_env.env.info import read_prompt
    from gspo_env.env.registration import make_env
    from gspo_env.model.load import load_model
    from gspo_env.recipes.build import TEMPLATE

    model, tokenizer = load_model(training.model or str(start))
    if training.model:
        model = PeftModel.from_pretrained(model, start, is_trainable=True)
    prompt = read_prompt(make_env(training.env_id, **training.env_kwargs))
    ids = ChatTokenizer(tokenizer).start("", prompt)
    listing = tokenizer.decode(ids).split("<|im_end|>")[0].split(prompt.system)[1]
    names = "{% for t in tools %}\n{{ t.function.name }}{% endfor %}"
    tokenizer.chat_template = TEMPLATE.replace(names, "{{ " + json.dumps(listing) + " }}")
    return model, tokenizer


def theirs(training: Training, start: Path, out: Path, seed: int, steps: int, limit: float) -> Any:
    """Returns TRL's trainer, which writes the time of each step to a file."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    from gspo_env.export.trl import environment_class, rows

    torch.set_num_threads(1)
    model, tokenizer = load_start(training, start)
    tokenizer.response_template = qwen3_template  # the same form of calls as Qwen3's
    played = environment_class(training.env_id, **training.env_kwargs)
    draw = np.random.default_rng(seed)
    seeds = [int(draw.integers(10**9)) for _ in range(training.tasks * steps)]
    successes: list[float] = []

    def earned(completions: Any, environments: Any, **kwargs: Any) -> list[float]:
        episodes: Any = [e._finish(c) for e, c in zip(environments, completions, strict=True)]
        successes.append(float(np.mean([episode["success"] for episode in episodes])))
        return [sum(each["turn_rewards"]) or each["outcome"] for each in episodes]

    class Timer(TrainerCallback):  # type: ignore[misc]
        """Notes each optimiser step."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            """Starts the clock."""
            self.clock = Clock(out)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            """Notes the success of a batch of episodes after its last optimiser step."""
            _, state, control = args
            if state.global_step % training.minibatches == 0:
                seconds = self.clock.step(successes[-1], kwargs["model"])
                control.should_training_stop = seconds > limit

    rows_of_minibatch = training.tasks * GROUP // training.minibatches
    at_once = min(AT_ONCE, rows_of_minibatch) if training.model else rows_of_minibatch
    settings = GRPOConfig(
        output_dir=str(out.with_suffix(".trl")),
        use_cpu=True,
        bf16=False,
        seed=seed,
        max_steps=steps * training.minibatches,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=rows_of_minibatch // at_once,
        steps_per_generation=training.tasks * GROUP // at_once,
        num_generations=GROUP,
        learning_rate=training.rate,
        lr_scheduler_type="cosine",
        warmup_steps=training.warm,
        max_grad_norm=training.norm,
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=CLIP[0],
        epsilon_high=CLIP[1],
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_completion_length=training.completion,
        max_tool_calling_iterations=16,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=10**6,
    )
    return GRPOTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list(rows(played, seeds)),
        processing_class=tokenizer,
        reward_funcs=[earned],
        environment_factory=played,
        callbacks=[Timer()],
    )


def reached(lines: list[Mapping[str, float]], goal: float) -> int | None:
    """Returns the step after which the mean of three steps is at the goal."""
    for step in range(2, len(lines)):
        if np.mean([line["success"] for line in lines[step - 2 : step + 1]]) >= goal:
            return step + 1
    return None


def show_times(runs_by_arm: dict[str, list[list[Mapping[str, float]]]], goal: float) -> None:
    """Prints a row for each arm, and the ratios."""
    print(f"\n| arm | seed | first and last success | steps to {goal:.0%} | processor s | wall s |")
    print("|---|---|---|---|---|---|")
    times: dict[str, list[float]] = {}
    least: dict[str, list[float]] = {}  # a run that did not reach the goal takes longer than this
    for arm, runs in runs_by_arm.items():
        for seed, lines in enumerate(runs):
            step = reached(lines, goal)
            at = lines[step - 1] if step else None
            times.setdefault(arm, []).append(at["processor"] if at else float("inf"))
            least.setdefault(arm, []).append((at or lines[-1])["processor"])
            ends = f"{lines[0]['success']:.0%}, {np.mean([x['success'] for x in lines[-3:]]):.0%}"
            never = f"over {len(lines)} | over {lines[-1]['processor']:.0f} | -"
            when = f"{step} | {at['processor']:.0f} | {at['wall']:.0f}" if at else never
            print(f"| {arm} | {seed} | {ends} | {when} |")
    medians = {arm: float(np.median(values)) for arm, values in times.items()}
    for arm in filter(ARMS.get, runs_by_arm):
        most = "" if np.isfinite(medians["TRL"]) else "less than "
        ratio = medians[arm] / float(np.median(least["TRL"]))
        share = f"{most}{ratio:.3f} of TRL's time (medians of the seeds)"
        print(f"{arm}: {share if np.isfinite(ratio) else 'did not reach the goal'}")
    steps = {
        arm: np.median([lines[-1]["processor"] / len(lines) for lines in r])
        for arm, r in runs_by_arm.items()
    }
    print("processor seconds a step: " + ", ".join(f"{arm} {s:.2f}" for arm, s in steps.items()))


def draw(
    runs_by_arm: dict[str, list[list[Mapping[str, float]]]], episodes_per_step: int, path: str
) -> None:
    """Draws the success of each run over the seconds of the processor and over episodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    for (arm, runs), colour in zip(
        runs_by_arm.items(), ("tab:blue", "tab:green", "tab:red"), strict=False
    ):
        for seed, lines in enumerate(runs):
            success = np.convolve([x["success"] for x in lines], np.ones(3) / 3, "valid")
            label = arm if seed == 0 else None
            axes[0].plot([x["processor"] for x in lines[2:]], success, colour, label=label)
            episodes = np.arange(3, len(lines) + 1) * episodes_per_step
            axes[1].plot(episodes, success, colour, label=label)
    axes[0].set(xlabel="seconds of the processor", ylabel="success, mean of 3 steps", xscale="log")
    axes[1].set(xlabel="episodes")
    axes[0].legend()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def train_theirs(*arguments: Any) -> None:
    """Trains with TRL; see `theirs`."""
    theirs(*arguments).train()


def alone(function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function in a process of its own, and waits for its end."""
    process = get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


def run_success(arguments: argparse.Namespace) -> None:
    """Runs the arms in turns."""
    training, steps = TRAININGS[arguments.model], arguments.steps
    folder = Path(arguments.output or tempfile.mkdtemp(prefix="time-to-success-"))
    folder.mkdir(parents=True, exist_ok=True)
    start = folder / "start"
    if not start.exists():
        make_start(training, start)
    runs_by_arm: dict[str, list[list[Mapping[str, float]]]] = {arm: [] for arm in arguments.arms}
    for seed in range(arguments.seeds):
        limit = 0.0
        for arm in arguments.arms:
            advantage = ARMS[arm]
            out = folder / f"{arm.replace(', ', '-')}-{seed}.jsonl"
            if not out.with_suffix(".done").exists():
                out.unlink(missing_ok=True)
                if advantage:
                    alone(ours, training, start, out, seed, steps, advantage)
                else:
                    alone(
                        train_theirs, training, start, out, seed, steps, limit * arguments.patience
                    )
                if training.model:
                    alone(evaluate, training, start, out)
                out.with_suffix(".done").touch()
            lines = [json.loads(line) for line in out.read_text().splitlines()]
            runs_by_arm[arm].append(lines)
            step = reached(lines, arguments.goals[0])
            limit = max(limit, lines[step - 1 if step else -1]["processor"])
    for goal in arguments.goals:
        show_times(runs_by_arm, goal)
    if arguments.picture:
        draw(runs_by_arm, training.tasks * GROUP, arguments.picture)
    print(f"every step is in {folder}")


def main() -> None:
    """Runs the comparison that is named."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    for run, models in ((run_update, None), (run_rollout, TRAININGS), (run_success, TRAININGS)):
        command = commands.add_parser(run.__name__.removeprefix("run_"), help=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("packages", help="the folder that TRL was installed into")
        default, text = ("tiny", "") if models else ("small", "small, large, or a model")
        command.add_argument("--model", choices=models, default=default, help=text)
    update, rollout, success = commands.choices.values()
    update.add_argument("--dtype", default="float32")
    update.add_argument("--groups", type=int, default=4)
    update.add_argument("--shared", type=int, default=512)
    update.add_argument("--own", type=int, nargs=2, default=(64, 128))
    update.add_argument("--rounds", type=int, default=7)
    update.add_argument("--lora", type=int, default=0, help="rank of an adapter, with --only")
    update.add_argument("--only", choices=PROGRAMS, default="")
    rollout.add_argument("--rounds", type=int, default=5)
    rollout.add_argument("--start", default="", help="what both start from")
    success.add_argument("--patience", type=float, default=float("inf"))
    success.add_argument("--seeds", type=int, default=3)
    success.add_argument("--steps", type=int, default=30)
    success.add_argument("--goals", type=float, nargs="+", default=[0.8, 0.9])
    success.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    success.add_argument("--output", default="", help="keeps each training; it goes on there")
    success.add_argument("--picture", default="", help="file of a picture of the curves")
    arguments = parser.parse_args()
    sys.path.append(arguments.packages)
    torch.set_num_threads(1)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
