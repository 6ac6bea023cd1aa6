"""Time and episodes until the agent is good: TRL's trainer and ours from the same warmed-up model.

    pip install --no-deps --target DIR "trl==1.16.*" "datasets<5" xxhash multiprocess dill \
        httpx httpcore jinja2
    python benchmarks/time_to_success.py DIR [--seeds 3] [--steps 30] [--goals 0.8 0.9]
    python benchmarks/time_to_success.py DIR --model smollm2 --seeds 1 --steps 3

The task is the look-up environment, the reward the return of an episode (0.2 a hop, 1 for the right
answer), a step 32 tasks of 8 episodes and 4 minibatches, the loss GSPO's with the same clip range,
learning rate and gradient norm. With `--model smollm2`, SmolLM2-135M works out stories with a
calculator, 4 tasks of 8 episodes and 2 minibatches a step; its chat template is that of the tiny
model, which lists tools. TRL plays by its own environment interface (`environment_factory`) with
`transformers`, as on any machine without vLLM. Ours runs with credit
by turn (the default) and with credit by outcome, which is what TRL can express. Each training is a
process of its own with one thread; arms take turns. A run has reached a goal after the first step
whose training episodes and those of the two steps before it have that mean success. Its time is the
seconds of the process's processor from the first step on; wall-clock seconds are printed too.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np

GROUP, CLIP = 8, (0.03, 0.05)
TURN, CONTEXT = 32, 512
ARMS = ("ours, turns", "ours, outcome", "TRL")


@dataclass(frozen=True)
class Training:
    """What depends on the model."""

    env_id: str
    tasks: int
    minibatches: int
    rate: float
    warm: int
    norm: float
    imitation: dict[str, Any]


TRAININGS = {
    "tiny": Training("gspo/Lookup-v0", 32, 4, 1e-3, 20, 0.1, {"imitation_steps": 110}),
    "smollm2": Training("gspo/Story-v0", 8, 2, 1e-5, 2, 0.1, {"imitation_steps": 48}),
}


def make_start(name: str, folder: Path) -> None:
    """Saves the model of a recipe after a short imitation."""
    from gspo_agents.gspo import GSPOAgent
    from gspo_env.config import Config

    if name == "tiny":
        config = Config.from_recipe(recipe=TRAININGS[name].imitation)
    else:
        from gspo_env.model.load import load_model
        from gspo_env.recipes.build import TEMPLATE

        model, tokenizer = load_model(name)
        tokenizer.chat_template = TEMPLATE
        plain = folder.with_name("plain")
        model.save_pretrained(plain)
        tokenizer.save_pretrained(plain)
        imitation = TRAININGS[name].imitation
        config = Config.from_recipe(name, model=str(plain), recipe=imitation)
    agent = GSPOAgent(env=TRAININGS[name].env_id, config=config)
    agent.warm_up()
    agent.save(folder)


class Clock:
    """Writes a line for each step: success, and seconds of the processor and of the wall."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.began = time.process_time(), time.perf_counter()

    def step(self, success: float) -> None:
        """Notes that a step is done."""
        line = {
            "success": success,
            "processor": time.process_time() - self.began[0],
            "wall": time.perf_counter() - self.began[1],
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def ours(training: Training, start: Path, out: Path, advantage: str, seed: int, steps: int) -> None:
    """Trains with this package."""
    from gspo_agents.gspo import GSPOAgent
    from gspo_env.config import Config
    from gspo_env.training.loop import Loop

    config = Config.from_recipe(
        model=str(start),
        recipe="none",
        advantage=advantage,
        seed=seed,
        steps=steps,
        tasks_per_step=training.tasks,
        eval_every=0,
        eval_tasks=1,
        tracker="none",
        rollout={"group_size": GROUP, "max_turn_tokens": TURN, "max_context": CONTEXT},
        loss={"clip_low": CLIP[0], "clip_high": CLIP[1]},
        learner={
            "learning_rate": training.rate,
            "warmup_steps": training.warm,
            "minibatches": training.minibatches,
            "schedule": "cosine",
            "max_grad_norm": training.norm,
        },
        checkpoints={"keep": 0},
        episodes={"keep_episodes": "none"},
        output=str(out.with_suffix(".run")),
    )
    agent = GSPOAgent(env=training.env_id, config=config)
    train_step, clocks = Loop._train_step, []

    async def timed(loop: Loop, *args: Any) -> None:
        if not clocks:
            clocks.append(Clock(out))
        await train_step(loop, *args)
        success = [m["rollout/success"] for _, m in loop.history if "rollout/success" in m]
        clocks[0].step(success[-1])

    Loop._train_step = timed  # type: ignore[method-assign]
    agent.train()


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
        from gspo_env.env.tools import format_tool_call

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


def theirs(training: Training, start: Path, out: Path, seed: int, steps: int) -> Any:
    """Returns TRL's trainer, which writes the time of each step to a file."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    from gspo_env.env.registration import make_env

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(start)
    tokenizer = AutoTokenizer.from_pretrained(start)
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
            if args[1].global_step % training.minibatches == 0:
                self.clock.step(successes[-1])

    settings = GRPOConfig(
        output_dir=str(out.with_suffix(".trl")),
        use_cpu=True,
        bf16=False,
        seed=seed,
        max_steps=steps * training.minibatches,
        per_device_train_batch_size=training.tasks * GROUP // training.minibatches,
        steps_per_generation=training.minibatches,
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
    for arm, runs in runs_by_arm.items():
        for seed, lines in enumerate(runs):
            step = reached(lines, goal)
            at = lines[step - 1] if step else None
            times.setdefault(arm, []).append(at["processor"] if at else float("inf"))
            ends = f"{lines[0]['success']:.0%}, {np.mean([x['success'] for x in lines[-3:]]):.0%}"
            when = f"{step} | {at['processor']:.0f} | {at['wall']:.0f}" if at else "- | - | -"
            print(f"| {arm} | {seed} | {ends} | {when} |")
    medians = {arm: float(np.median(values)) for arm, values in times.items()}
    for arm in ARMS[:2]:
        ratio = f"{medians[arm] / medians['TRL']:.3f} of TRL's time (medians of the seeds)"
        print(f"{arm}: {ratio if np.isfinite(medians['TRL']) else 'TRL did not reach the goal'}")
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
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--goals", type=float, nargs="+", default=[0.8, 0.9])
    parser.add_argument("--output", default="", help="keeps each training; it goes on there")
    parser.add_argument("--picture", default="", help="file of a picture of the curves")
    parser.add_argument("--start", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    parser.add_argument("--arm", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    training = TRAININGS[arguments.model]
    start, out = Path(arguments.start), Path(arguments.out)
    if arguments.arm == "TRL":
        sys.path.append(arguments.packages)
        theirs(training, start, out, arguments.seed, arguments.steps).train()
        return
    if arguments.arm:
        kind = "outcome" if "outcome" in arguments.arm else "returns_to_go"
        ours(training, start, out, kind, arguments.seed, arguments.steps)
        return
    folder = Path(arguments.output or tempfile.mkdtemp(prefix="time-to-success-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "start").exists():
        make_start(arguments.model, folder / "start")
    runs_by_arm: dict[str, list[list[Mapping[str, float]]]] = {arm: [] for arm in ARMS}
    for seed in range(arguments.seeds):
        for arm in ARMS:
            out = folder / f"{arm.replace(', ', '-')}-{seed}.jsonl"
            flags = [f"--{k}={v}" for k, v in {"arm": arm, "seed": seed, "out": out}.items()]
            flags += [f"--start={folder / 'start'}", f"--steps={arguments.steps}"]
            flags += [f"--model={arguments.model}"]
            if not out.exists() or len(out.read_text().splitlines()) < arguments.steps:
                out.unlink(missing_ok=True)
                subprocess.run([sys.executable, __file__, arguments.packages, *flags], check=True)
            runs_by_arm[arm].append([json.loads(line) for line in out.read_text().splitlines()])
    for goal in arguments.goals:
        show(runs_by_arm, goal)
    if arguments.picture:
        draw(runs_by_arm, training.tasks * GROUP, arguments.picture)
    print(f"every step is in {folder}")


if __name__ == "__main__":
    main()
