"""Four forms of one agent against the native environment: the same episodes, the same training.

`python tests/forms.py same` plays the look-up agents of `examples/agents` and the native
environment with the model that all of them start from, and compares the episodes id by id.
`... study --output FOLDER` trains them. It writes one line for each run and goes on where it
stopped; `... table --output FOLDER` prints what is there. It needs the extra `agents` and node.

Every arm reads the same rows and draws the same tasks and tokens from a seed. `native` is
`gspo/Lookup-v0` over these rows: it rewards each hop at its turn, and after a call that cannot be
parsed it goes on with an error message. `native-end` does what the programs do: it pays the same
rewards at the last turn, and such a call ends the episode, since the agents return it as text.

The rule was written before any form was trained with these settings: success on 400 held-out tasks
after 40 updates, each form played through its own program, is on the mean of seeds 0, 1 and 2
within 5 points of `native`. `--tasks` and `--learning-rate` were chosen with the native arms only,
on seeds 10 and 11 and another start. The aim was four runs that end at 90 % or more. With 8 tasks,
a constant rate of 1e-3 gave 63.0 and 76.2 % (with 16 tasks 79.2 and 92.2 %), a cosine from 5e-4
86.2 to 95.5 % (three runs), and one from 3e-4 89.5 to 92.0 %: short of the aim in one run, and
taken because its runs differ least.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspo_agents.gspo import GSPOAgent
from gspo_env.chat.transcript import ChatTokenizer
from gspo_env.cli.capture import to_lines
from gspo_env.config import Config
from gspo_env.env.base import Options, ResetResult, StepResult
from gspo_env.env.registration import make_env
from gspo_env.env.tools import format_tool_call
from gspo_env.model.load import load_model
from gspo_env.recipes.base import Recipe
from gspo_env.recipes.build import build, imitation_samples, warm_up
from gspo_env.recipes.tiny import Tiny
from gspo_env.registry import load_module
from gspo_env.rollout.play import play_now
from gspo_env.types import Episode, Task
from gspo_envs.data.rows import TaskRows, begin_chat
from gspo_envs.text.lookup import LookupEnv

ENV = "gspo/Program-v0"
EXAMPLES = Path(__file__).parents[1] / "examples" / "agents"
TASKS = load_module(str(EXAMPLES / "lookup_tasks.py"))
FORMS: dict[str, dict[str, Any]] = {
    "openai": {"program": f"{EXAMPLES / 'lookup_openai.py'}:run"},
    "node": {"command": ["node", str(EXAMPLES / "lookup.js")]},
    "openai-agents": {"program": f"{EXAMPLES / 'lookup_openai_agents.py'}:run"},
    "langgraph": {"program": f"{EXAMPLES / 'lookup_langgraph.py'}:run"},
}
NATIVE = {"native": f"{__file__}:Native", "native-end": f"{__file__}:NativeEnd"}
ARMS = (*NATIVE, *FORMS)
ROWS, HELD_OUT, MAX_TURNS = 4000, 400, 8
SETTINGS = ("steps", "tasks", "start_seed", "captured", "imitation_steps", "learning_rate")
SETTINGS += ("warmup_steps",)
LIMITS = {"max_turn_tokens": 32, "max_context": 512}


class Native(LookupEnv):
    """The native look-up environment over the rows of the programs."""

    def __init__(self, data: str) -> None:
        """Opens the rows."""
        super().__init__()
        self.max_turns = MAX_TURNS
        self._rows = TaskRows(data)

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Begins the task that `gspo/Program-v0` has at this seed."""
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | begin_chat([{"role": "user", "content": ""}], *self._row)[1]

    def draw(self, options: dict[str, Any]) -> str:
        """Picks the row."""
        row, index = self._rows.pick(self.np_random, self.np_random_seed, options.get("row"))
        question: str = row["question"]
        self._row, self._links, self._progress = (index, row), row["links"], 0
        self._values = [question.split('"')[1], *row["path"]]
        return question


class NativeEnd(Native):
    """The same with what the agents do: rewards at the last turn, no turn after a broken call."""

    gives_outcome = False

    def step(self, action: str) -> StepResult:
        """Keeps rewards back until the end."""
        observation, reward, terminated, truncated, info = super().step(action)
        if info.get("malformed_calls"):
            terminated, truncated, self._ended = True, False, True
            info["success"] = False
        self._kept = reward + (self._kept if self._turn > 1 else 0.0)
        reward = self._kept if terminated or truncated else 0.0
        return observation, reward, terminated, truncated, info


def lookup(folder: Path, **kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of the look-up task."""
    rewards = [f"{EXAMPLES / 'lookup_tasks.py'}:{name}" for name in ("right", "hops")]
    limits = {"success": 1.0, "max_turns": MAX_TURNS}
    return {"data": rows(folder), "rewards": rewards, **limits, **kwargs}


def rows(folder: Path) -> str:
    """Returns the file of the tasks."""
    data = folder / "lookup.jsonl"
    if not data.exists():
        data.write_text("".join(f"{json.dumps(TASKS.make_task(n))}\n" for n in range(ROWS)))
    return str(data)


def captured(folder: Path, count: int, slips: float = 0.05, early: float = 0.3) -> Path:
    """Plays the plain agent with a scripted policy and writes the conversations to a file.

    A word is wrong with probability `slips`, and a share of the episodes answers one hop early. The
    file has the form that `gspo-env capture` writes and `--conversations` reads.
    """
    path = folder / "captured.jsonl"
    if path.exists():
        return path
    env = make_env(ENV, **lookup(folder, **FORMS["openai"]))
    episodes = []
    for n in range(count):
        rng, row = random.Random(n), n % (ROWS - HELD_OUT)
        row += row // (ROWS // HELD_OUT - 1)  # none that is held out
        task = TASKS.make_task(row)
        hops = len(task["path"]) - (rng.random() < early)

        def act(now: Any, task: Any = task, hops: int = hops, rng: Any = rng) -> str:
            word = now.observation.split('"')[1] if now.turn == 0 else now.observation
            word = rng.choice(list(task["links"])) if rng.random() < slips else word
            if now.turn >= hops:
                return f"<answer>{word}</answer>"
            return format_tool_call("lookup", {"key": word})

        episodes.append(play_now(env, Task(env_id=ENV, seed=n, options={"row": row}), act))
    env.close()
    played = [episode for episode in episodes if not episode.failed]
    right = np.mean([bool(episode.success) for episode in played])
    print(f"captured {len(played)} of {count} conversations, {right:.0%} of them right", flush=True)
    path.write_text("".join(f"{line}\n" for episode in played for line in to_lines(episode)))
    return path


def imitating(folder: Path, options: argparse.Namespace) -> Path:
    """Makes the tiny model that imitated captured conversations of the plain agent, once."""
    start = folder / "start"
    if start.exists():
        return start
    path, native = captured(folder, options.captured), "gspo/Lookup-v0"
    config = Tiny(
        conversations=str(path),
        imitation_steps=options.imitation_steps,
        initializer_range=0.02,  # measured with this
    )
    model, tokenizer, episodes = build({native: make_env(native)}, config, options.start_seed)
    samples = imitation_samples(episodes, ChatTokenizer(tokenizer))
    warm_up(model, samples, config, options.start_seed, lambda step, loss: None)
    model.save_pretrained(start)
    tokenizer.save_pretrained(start)
    return start


def make_arm(arm: str, folder: Path, seed: int, options: argparse.Namespace) -> GSPOAgent:
    """Makes the agent of an arm from the start."""
    if arm in FORMS:
        return make_agent(ENV, lookup(folder, **FORMS[arm]), folder, seed, options)
    return make_agent(NATIVE[arm], {"data": rows(folder)}, folder, seed, options)


def make_agent(
    env: str,
    kwargs: dict[str, Any],
    folder: Path,
    seed: int,
    options: argparse.Namespace,
    **changes: Any,
) -> GSPOAgent:
    """Makes an agent from the start."""
    config = Config.from_recipe(
        Recipe(),
        env=env,
        env_kwargs=kwargs,
        seed=seed,
        steps=options.steps,
        tasks_per_step=options.tasks,
        rollout=LIMITS,
        loss={"clip_low": 0.03, "clip_high": 0.05},
        learner={
            "learning_rate": options.learning_rate,
            "warmup_steps": options.warmup_steps,
            "schedule": "cosine",
        },
        tracker="none",
        output=str(folder / "runs" / str(time.time_ns())),
        **{"eval_every": 0, "eval_tasks": 16, **changes},  # `evaluate` plays all held-out rows
    )
    model, tokenizer = load_model(str(folder / "start"), "float32")
    return GSPOAgent(model, config=config, tokenizer=tokenizer)


def evaluate(agent: GSPOAgent, count: int = HELD_OUT) -> list[Episode]:
    """Plays each held-out row once; a failed episode is no success."""
    every = ROWS // HELD_OUT
    places = [{"row": every * n + every - 1} for n in range(count)]
    tasks = [Task(env_id=agent.env_id, seed=n, options=options) for n, options in enumerate(places)]
    return [group.episodes[0] for group in agent.evaluate(tasks, seed=0)]


def success(episodes: Sequence[Episode]) -> float:
    return float(np.mean([bool(episode.success) for episode in episodes]))


def run_arm(arm: str, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Trains one arm on one seed; returns what its line says."""
    wall, processor = time.perf_counter(), time.process_time()
    agent = make_arm(arm, folder, seed, options)
    metrics = [m for _, m in agent.train() if "train/loss" in m]
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    own = evaluate(agent)
    natively = own
    if arm in FORMS:
        player = make_arm("native", folder, seed, options)
        player.model.load_state_dict(agent.model.state_dict())
        natively = evaluate(player)
        player.close()
    agent.close()
    return {
        "arm": arm,
        "seed": seed,
        "success": success(own),
        "success_natively": success(natively),
        "failed": sum(episode.failed for episode in own),
        "lost": sum(m.get("rollout/lost_episodes", 0.0) for m in metrics),
        "logprob_diff_max": max(m["train/logprob_diff_max"] for m in metrics),
        "rollout_success": [round(m["rollout/success"], 4) for m in metrics],
        "seconds": round(wall),
        "own_processor_seconds": round(processor),
    }


def study(options: argparse.Namespace) -> None:
    """Trains each arm on each seed, seed by seed, and skips what the file has."""
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(options, name) for name in SETTINGS}
    kept = folder / "settings.json"
    if kept.exists() and json.loads(kept.read_text()) != settings:
        raise SystemExit(f"{kept} has {kept.read_text()}, expected {settings}")
    kept.write_text(json.dumps(settings))
    imitating(folder, options)
    path = folder / "results.jsonl"
    path.touch()
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for arm in options.arms:
            if any((row["arm"], row["seed"]) == (arm, seed) for row in read(path)):
                continue
            line = json.dumps(run_arm(arm, seed, folder, options))
            with path.open("a") as file:
                file.write(f"{line}\n")
            print(line, flush=True)
    table(options)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(options: argparse.Namespace) -> None:
    """Prints the success of each arm, and its difference to the native ones over its seeds."""
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in read(Path(options.output) / "results.jsonl"):
        found[row["arm"]][row["seed"]] = row
    print("| arm | success by seed, % | mean | to native | to native-end | played natively |")
    print("|---|---|---|---|---|---|")
    for arm in ARMS:
        if arm not in found:
            continue
        runs = dict(sorted(found[arm].items()))
        each = ", ".join(f"{100 * run['success']:.1f}" for run in runs.values())
        cells = [each, f"{100 * statistics.mean(r['success'] for r in runs.values()):.1f}"]
        for other in NATIVE:
            both = [s for s in runs if s in found[other]]
            gaps = [100 * (runs[s]["success"] - found[other][s]["success"]) for s in both]
            cells.append(f"{statistics.mean(gaps):+.1f}" if gaps and arm != other else "")
        cells.append(f"{100 * statistics.mean(r['success_natively'] for r in runs.values()):.1f}")
        print(f"| {arm} | {' | '.join(cells)} |")


def same(options: argparse.Namespace) -> None:
    """Plays the same held-out tasks from the start and compares the episodes of all arms."""
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    imitating(folder, options)
    played: dict[str, list[Episode]] = {}
    first, *others = dict.fromkeys(["native-end", *options.arms])
    for arm in (first, *others):
        agent = make_arm(arm, folder, 0, options)
        played[arm] = evaluate(agent, options.episodes)
        agent.close()
    for arm in others:
        pairs = list(zip(played[first], played[arm], strict=True))
        equal = [ids(one) == ids(two) for one, two in pairs]
        paid = sum(abs(sum(a.rewards) - sum(b.rewards)) < 1e-9 for a, b in pairs)
        judged = sum(a.success == b.success for a, b in pairs)
        print(
            f"{arm:14} of {len(pairs)} episodes {sum(equal)} have the ids of {first} in every "
            f"turn, {paid} its return, {judged} its success"
        )
        for (one, two), is_equal in zip(pairs, equal, strict=True):
            if not is_equal:
                print(f"  {first}: {shown(one)}\n  {arm}: {shown(two)}")


def ids(episode: Episode) -> list[tuple[Any, ...]]:
    return [(turn.prompt_ids, turn.action_ids) for turn in episode.turns]


def shown(episode: Episode) -> list[Any]:
    return [turn.text for turn in episode.turns] + [str(episode.stop_reason), episode.error]


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the settings of the start and of a training."""
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tasks", type=int, default=8, help="tasks of a step, 8 episodes each")
    parser.add_argument("--start-seed", type=int, default=0)
    parser.add_argument("--captured", type=int, default=2000, help="conversations to imitate")
    parser.add_argument("--imitation-steps", type=int, default=500)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--warmup-steps", type=int, default=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("same", "study", "table"))
    parser.add_argument("--output", required=True, help="folder of the results")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=128, help="same: episodes of each arm")
    add_settings(parser)
    options = parser.parse_args()
    logging.getLogger("gspo_env").setLevel(logging.ERROR)
    {"same": same, "study": study, "table": table}[options.what](options)


if __name__ == "__main__":
    main()
