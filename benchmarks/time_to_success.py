"""Time and episodes until the agent is good: TRL's trainer and ours from the same warmed-up model.

    pip install --no-deps --target DIR "trl==1.16.*" "datasets<5" xxhash multiprocess dill \
        httpx httpcore jinja2
    python benchmarks/time_to_success.py DIR [--seeds 3] [--steps 30] [--goals 0.8 0.9]
    python benchmarks/time_to_success.py DIR --model smollm2 --seeds 2 --steps 12 --goals 0.9 \
        --patience 9

The task is the look-up environment, the reward the return of an episode (0.2 a hop, 1 for the right
answer), a step 32 tasks of 8 episodes and 4 minibatches, the loss GSPO's with the same clip range,
learning rate and gradient norm. With `--model smollm2`, it is the recipe `smollm2`: SmolLM2-135M
works out stories with a calculator, 8 tasks of 8 episodes and 2 minibatches a step; both continue
the adapter that has imitated, on the same tokens. TRL plays by its own environment interface
(`environment_factory`) with `transformers`, as on any machine without vLLM. Ours runs with credit
by turn (the default) and with credit by outcome, which is what TRL can express. Each training is a
process of its own with one thread; arms take turns. A run has reached a goal after the first step
whose episodes and those of the two steps before it have that mean success: training episodes, and
for SmolLM2 two of each of 64 held-out tasks, which our engine plays afterwards with the adapter of
each step. Its time is the seconds of the process's processor from the first step on; wall-clock
seconds are printed too. `--patience` stops TRL after that multiple of our longest time to the first
goal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np

GROUP, CLIP, CONTEXT = 8, (0.03, 0.05), 512
AT_ONCE = 8
"""Episodes that TRL's update of a real model holds in memory."""
ARMS = ("ours, turns", "ours, outcome", "TRL")


@dataclass(frozen=True)
class Training:
    """What depends on the model."""

    model: str
    env_id: str
    tasks: int
    minibatches: int
    rate: float
    warm: int
    norm: float
    turn: int
    rank: int
    imitation: dict[str, Any]


TRAININGS = {
    "tiny": Training("", "gspo/Lookup-v0", 32, 4, 1e-3, 20, 0.1, 32, 0, {"imitation_steps": 110}),
    "smollm2": Training("smollm2", "gspo/Story-v0", 8, 2, 1e-4, 2, 0.03, 40, 16, {}),
}


def make_start(training: Training, folder: Path) -> None:
    """Saves the model of a recipe, or its adapter, after the imitation."""
    from gspo_agents.gspo import GSPOAgent
    from gspo_env.config import Config
    from gspo_env.tracking.console import Progress

    config = Config.from_recipe(training.model or "tiny", recipe=training.imitation)
    GSPOAgent(env=training.env_id, config=config).save_start(folder, Progress())


class Clock:
    """Writes a line for each step: success, and seconds of the processor and of the wall."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.processor, self.wall = time.process_time(), time.perf_counter()

    def step(self, success: float, model: Any) -> float:
        """Notes that a step is done, and saves its adapter; returns the processor's seconds."""
        processor, wall = time.process_time() - self.processor, time.perf_counter() - self.wall
        with self.path.open("a") as file:
            line = {"success": success, "processor": processor, "wall": wall}
            file.write(json.dumps(line) + "\n")
        if hasattr(model, "disable_adapter"):
            steps = len(self.path.read_text().splitlines())
            model.save_pretrained(self.path.with_suffix(".steps") / str(steps))
        return processor


def configure(training: Training, start: Path, seed: int, **settings: Any) -> Any:
    """Returns the settings of our training and of the evaluation of both."""
    from gspo_env.config import Config

    return Config.from_recipe(
        model=training.model or str(start),
        recipe="none",
        seed=seed,
        tasks_per_step=training.tasks,
        eval_every=0,
        tracker="none",
        rollout={"group_size": GROUP, "max_turn_tokens": training.turn, "max_context": CONTEXT}
        | ({"concurrency": 64} if training.model else {}),
        loss={"clip_low": CLIP[0], "clip_high": CLIP[1]},
        learner={
            "learning_rate": training.rate,
            "warmup_steps": training.warm,
            "minibatches": training.minibatches,
            "schedule": "cosine",
            "max_grad_norm": training.norm,
            "lora_rank": training.rank,
        },
        checkpoints={"keep": 0},
        episodes={"keep_episodes": "none"},
        **settings,
    )


def start_agent(training: Training, start: Path, seed: int, **settings: Any) -> Any:
    """Loads an agent that begins with the start."""
    from gspo_agents.gspo import GSPOAgent

    config = configure(training, start, seed, **settings)
    return GSPOAgent.from_start(start, replace(config, env=training.env_id))


def ours(training: Training, start: Path, out: Path, advantage: str, seed: int, steps: int) -> None:
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
    from gspo_env.model.load import load_adapter

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


class Played:
    """An environment as TRL wants it: its public methods are the tools."""

    env_id = ""

    def __init__(self) -> None:
        from gspo_env.env.registration import make_env

        self._env = make_env(self.env_id)

    def reset(self, seed: int = 0, **row: Any) -> str:
        """Begins the episode of a row's seed."""
        observation, _ = self._env.reset(seed=seed)
        self._earned, self._done, self._success = 0.0, False, False
        return str(observation)

    def _call(self, name: str, **arguments: str) -> str:
        from gspo_env.tools.tool import format_tool_call

        return self._act(format_tool_call(name, arguments))

    def _act(self, action: str) -> str:
        if self._done:
            return ""
        observation, reward, terminated, truncated, info = self._env.step(action)
        self._earned += float(reward)
        self._done = terminated or truncated
        self._success = bool(info.get("success", False))
        return str(observation)


class Lookup(Played):
    """The look-up environment."""

    env_id = "gspo/Lookup-v0"

    def lookup(self, key: str) -> str:
        """Look up the word that a word links to; unknown key where there is none.

        Args:
            key: The word to look up.
        """
        return self._call("lookup", key=key)


class Story(Played):
    """Stories in words with a calculator."""

    env_id = "gspo/Story-v0"

    def calculate(self, expression: str) -> str:
        """Add or subtract two numbers.

        Args:
            expression: Such as 7 + 5.
        """
        return self._call("calculate", expression=expression)


def load_start(training: Training, start: Path) -> tuple[Any, Any]:
    """Loads the start for TRL; the template of a real model lists the tools as ours does."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gspo_env.chat.transcript import ChatTokenizer
    from gspo_env.env.info import read_prompt
    from gspo_env.env.registration import make_env
    from gspo_env.model.load import load_model
    from gspo_env.recipes.build import TEMPLATE

    if not training.model:
        tokenizer = AutoTokenizer.from_pretrained(start)
        return AutoModelForCausalLM.from_pretrained(start), tokenizer
    model, tokenizer = load_model(training.model)
    prompt = read_prompt(make_env(training.env_id))
    ids = ChatTokenizer(tokenizer).start("", prompt)
    listing = tokenizer.decode(ids).split("<|im_end|>")[0].split(prompt.system)[1]
    names = "{% for t in tools %}\n{{ t.function.name }}{% endfor %}"
    tokenizer.chat_template = TEMPLATE.replace(names, "{{ " + json.dumps(listing) + " }}")
    return PeftModel.from_pretrained(model, start, is_trainable=True), tokenizer


def theirs(training: Training, start: Path, out: Path, seed: int, steps: int, limit: float) -> Any:
    """Returns TRL's trainer, which writes the time of each step to a file."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    from gspo_env.env.registration import make_env

    torch.set_num_threads(1)
    model, tokenizer = load_start(training, start)
    tokenizer.response_template = qwen3_template  # the same form of calls as Qwen3's
    system = make_env(training.env_id).get_wrapper_attr("system_prompt")
    chat = [{"role": "system", "content": system}, {"role": "user", "content": ""}]
    draw = np.random.default_rng(seed)
    rows = [
        {"prompt": chat, "seed": int(draw.integers(10**9))} for _ in range(training.tasks * steps)
    ]
    successes: list[float] = []

    def earned(completions: Any, environments: Any, **kwargs: Any) -> list[float]:
        for completion, env in zip(completions, environments, strict=True):
            last = completion[-1]
            if last["role"] == "assistant" and not last.get("tool_calls"):
                env._act(str(last.get("content") or ""))
        successes.append(float(np.mean([env._success for env in environments])))
        return [env._earned for env in environments]

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
        max_completion_length=160,
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
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        reward_funcs=[earned],
        environment_factory=next(c for c in (Lookup, Story) if c.env_id == training.env_id),
        callbacks=[Timer()],
    )


def reached(lines: list[Mapping[str, float]], goal: float) -> int | None:
    """Returns the step after which the mean of three steps is at the goal."""
    for step in range(2, len(lines)):
        if np.mean([line["success"] for line in lines[step - 2 : step + 1]]) >= goal:
            return step + 1
    return None


def show(runs_by_arm: dict[str, list[list[Mapping[str, float]]]], goal: float) -> None:
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
    for arm in ARMS[:2]:
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
        runs_by_arm.items(), ("tab:blue", "tab:green", "tab:red"), strict=True
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


def main() -> None:
    """Runs the arms in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", help="the folder with TRL")
    parser.add_argument("--model", choices=sorted(TRAININGS), default="tiny")
    parser.add_argument("--patience", type=float, default=float("inf"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--goals", type=float, nargs="+", default=[0.8, 0.9])
    parser.add_argument("--output", default="", help="keeps each training; it goes on there")
    parser.add_argument("--picture", default="", help="file of a picture of the curves")
    parser.add_argument("--start", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    parser.add_argument("--arm", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    training = TRAININGS[arguments.model]
    start, out, seed = Path(arguments.start), Path(arguments.out), arguments.seed
    if arguments.arm == "TRL":
        sys.path.append(arguments.packages)
        theirs(training, start, out, seed, arguments.steps, arguments.limit).train()
    elif arguments.arm == "evaluate":
        evaluate(training, start, out)
    elif arguments.arm:
        kind = "outcome" if "outcome" in arguments.arm else "returns_to_go"
        ours(training, start, out, kind, seed, arguments.steps)
    if arguments.arm:
        return
    folder = Path(arguments.output or tempfile.mkdtemp(prefix="time-to-success-"))
    folder.mkdir(parents=True, exist_ok=True)
    start = folder / "start"
    if not start.exists():
        make_start(training, start)

    def run(arm: str, out: Path, seed: int, limit: float) -> None:
        values = {"model": arguments.model, "start": start, "steps": arguments.steps}
        values |= {"arm": arm, "out": out, "seed": seed, "limit": limit}
        flags = [f"--{k}={v}" for k, v in values.items()]
        subprocess.run([sys.executable, __file__, arguments.packages, *flags], check=True)

    runs_by_arm: dict[str, list[list[Mapping[str, float]]]] = {arm: [] for arm in ARMS}
    for seed in range(arguments.seeds):
        limit = 0.0
        for arm in ARMS:
            out = folder / f"{arm.replace(', ', '-')}-{seed}.jsonl"
            if not out.with_suffix(".done").exists():
                out.unlink(missing_ok=True)
                run(arm, out, seed, limit * arguments.patience)
                if training.model:
                    run("evaluate", out, seed, 0.0)
                out.with_suffix(".done").touch()
            lines = [json.loads(line) for line in out.read_text().splitlines()]
            runs_by_arm[arm].append(lines)
            step = reached(lines, arguments.goals[0])
            limit = max(limit, lines[step - 1 if step else -1]["processor"])
    for goal in arguments.goals:
        show(runs_by_arm, goal)
    if arguments.picture:
        draw(runs_by_arm, training.tasks * GROUP, arguments.picture)
    print(f"every step is in {folder}")


if __name__ == "__main__":
    main()
