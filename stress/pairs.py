"""Trains with every pair of settings, and compares each run with a reference that shares no code.

    python stress/pairs.py                       # all pairs
    python stress/pairs.py --rows 12 --seed 7    # twelve of the rows, drawn by a seed
    python stress/pairs.py --triples --hours 2   # triples, as many as fit into the time
    python stress/pairs.py --plant               # ten planted faults, each caught by a row
    python stress/pairs.py --matrix              # what cannot be combined
    python stress/pairs.py --published           # combinations that others have published
    python stress/pairs.py --sets smollm2 vllm   # rows with layers of SmolLM2, and with vLLM

The settings come from the tree of `Config` and from the registry, so a new choice is in by itself.
A row trains a tiny model for three steps, repeats the last one as after a kill, and is evaluated,
viewed, diagnosed, rescored and synced; its batches are replayed, compared and rewound. It ends
well, or one sentence refuses it. The reference is in `pairs_oracle.py`. Exit code 1 if a row is
wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import typing
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import pairs_envs
import pairs_terminal
import torch
from pairs_oracle import Run
from pairs_sets import SETS
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from gspo_agents.gspo import GSPOAgent
from gspo_agents.setup import check_learning
from gspo_env.cli.diagnose import Diagnose
from gspo_env.cli.evaluate import Evaluate
from gspo_env.cli.main import parse
from gspo_env.cli.rescore import Rescore
from gspo_env.cli.sync import Sync
from gspo_env.cli.view import View
from gspo_env.config import Config, override
from gspo_env.env.isolated import ISOLATED
from gspo_env.errors import ConfigError, GspoEnvError, RolloutError, TrainingError
from gspo_env.health.startup import check_settings, check_start
from gspo_env.model.load import load_model
from gspo_env.registry import BUILTIN, find
from gspo_env.tracking.base import flatten

STEPS, LIMIT = 3, 600
"""Steps of a run, and the seconds that a row may take."""
ENVS = str(HERE / "pairs_envs.py")
JUDGES = tuple(str(HERE / f"pairs_judges.py:{name}") for name in ("RANK", "CRITERIA"))
BASE = {
    "steps": STEPS,
    "eval_every": 2,
    "eval_tasks": 2,
    "checkpoints": {"save_every": 1, "keep": 99},
    "episodes": {"keep_episodes": "all"},
    "learner": {"learning_rate": 1e-3, "warmup_steps": 2, "max_grad_norm": 0.5},
    "loss": {"clip_low": 0.02, "clip_high": 0.03},
    "rollout": {"max_retries": 0},
}
HEAD = "| settings | the sentence, of one of them |"
"""The first line of the table of what cannot be combined."""
OTHER_KINDS = ("recipe",)
"""Kinds of choices that say what a run begins with: all rows begin with the same model."""
ELSEWHERE = {
    "engine": ("vllm", "vllm-server"),
    "tracker": ("tensorboard", "trackio", "wandb"),
}
"""Choices that need a package or a machine of their own; their tests are marked."""
ARGUMENTS = {
    "advantage": {
        "by_agent": ({}, {"weights": {"left": 2.0, "right": -0.5}, "missing": 0.25}),
        "distillation": (
            {"hint": "solution"},
            {"teacher": "teacher", "credit": 0.5, "gamma": 0.9, "weight": 0.5},
            {"hint": "solution", "credit": 1.0, "estimator": "gigpo", "turn_steps": 2},
        ),
        "parts": (
            {"weights": {"reward": 1.0, "even": 0.5, "tokens": -0.2}},
            {"weights": {"reward": 1.0, "even": -1.0}, "estimator": "gigpo"},
        ),
    },
    "curriculum": {"ladder": ({"option": "level", "success": 0.1, "window": 1},)},
    "compaction": {"summary": ({"instruction": "Say a word.", "summary_tokens": 6},)},
    "tracker": {"mlflow": ({"tracking_uri": "sqlite:///store.db", "traces": 1},)},
}
"""The settings of choices that need some, or have a table."""
NUMBERS: dict[str, tuple[Any, ...]] = {
    "stop_at_success": (0.0, 0.01),
    "tasks_per_step": (2, 1),
    "rollout.group_size": (4, 2, 8, 1),
    "rollout.temperature": (1.0, 0.7),
    "rollout.max_turns": (16, 2, 1),
    "rollout.max_turn_tokens": (8, 3),
    "rollout.max_context": (512, 60),
    "supply.max_staleness": (0, 1, 2),
    "supply.max_resamples": (0, 2),
    "supply.min_success": (0.0, 0.2),
    "supply.max_success": (1.0, 0.8),
    "credit.rms": (0.0, 0.5),
    "learner.weight_decay": (0.0, 0.1),
    "learner.minibatches": (1, 2, 4),
    "learner.microbatch_tokens": (0, 80),
    "learner.observation_coef": (0.0, 0.1),
    "learner.entropy_coef": (0.0, 0.05),
    "learner.entropy_target": (0.0, 1.5),
    "learner.entropy_share": (1.0, 0.3),
    "learner.lora_rank": (0, 2),
    "learner.lora_alpha": (0.0, 3.0),
    "learner.lora_targets": ("all-linear", "q_proj,down_proj"),
    "advantage.gamma": (1.0, 0.8),
    "advantage.lam": (0.95, 0.0),
    "advantage.turn_weight": (1.0, 0.5),
    "advantage.step_weight": (1.0, 2.0),
    "loss.ratio_mean": (0.0, 1.0),
    "loss.clip_staleness": (0.0, -1.0, 0.5),
    "loss.dual_clip": (0.0, 3.0),
    "loss.kl_coef": (0.0, 0.05),
    "loss.max_tokens": (1024, 7),
    "episodes.keep_batches": ("all", "last", 2, "none"),
}
"""Values of the settings that are numbers, the usual one first."""
CONSTANT = {
    "what a run begins with, and where it is kept": (
        "model seed output checkpoints.save_every checkpoints.keep recipe.* tracker.* "
        "episodes.keep_groups episodes.keep_mb engine.shared_folder curriculum.values"
    ),
    "the same in all rows, as the reference needs it": (
        "steps eval_every eval_tasks episodes.keep_episodes learner.optimizer"
    ),
    "`ENVIRONMENTS` has it": "env env_kwargs",
    "`ARGUMENTS` has it": (
        "curriculum.option curriculum.success curriculum.window compaction.instruction "
        "compaction.summary_tokens advantage.teacher advantage.hint advantage.weight "
        "advantage.weights advantage.missing advantage.turn_steps advantage.credit "
        "advantage.estimator"
    ),
    "a size whose value chooses no other computation": (
        "learner.learning_rate learner.warmup_steps learner.max_grad_norm "
        "learner.imitation_coef learner.imitation_episodes loss.clip_low "
        "loss.clip_high loss.correction_cap loss.tau_pos loss.tau_neg loss.cap loss.k_pos "
        "loss.lambda_pos loss.k_neg loss.lambda_neg loss.mask_low loss.mask_high curriculum.share "
        "curriculum.decay"
    ),
    "it decides about failures, which `hostile.py` and `soak.py` have": (
        "strict rollout.episode_timeout rollout.max_retries rollout.max_env_error_rate "
        "rollout.max_worker_restarts learner.max_skipped_steps engine.server_start_timeout "
        "engine.max_server_restarts engine.request_timeout"
    ),
    "how much is done at a time": "rollout.concurrency",
    "it needs another machine": (
        "rollout.ray_address engine.tensor_parallel_size engine.gpu_memory_utilization "
        "engine.quantization engine.engine_args engine.sleep_during_update engine.addresses "
        "engine.transfer engine.dtype"
    ),
    "`pairs_sets.py` has it": (
        "rollout.workers engine.adapter_only engine.undo_updates engine.sync_tolerance "
        "engine.follow_cache engine.replicas engine.enforce_eager engine.kv_cache_gib"
    ),
}
"""Settings that stay as they are in the table of all pairs, by the reason."""
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    **{name: {"env": f"{ENVS}:{name}"} for name in ("Words", "Final", "Both", "Masked")},
    **{name: {"env": f"{ENVS}:{name}"} for name in ("Ranked", "Judged", "Edited", "Long")},
    "several": {"env": (f"one={ENVS}:Words:0.7", f"two={ENVS}:Final:0.3")},
    "mixed": {"env": (f"two={ENVS}:Final:0.5", f"three={ENVS}:Both:0.5")},
    "lookup": {"env": "gspo/Lookup-v0"},
    "dialogue": {"env": "gspo/Dialogue-v0"},
    "dataset": {
        "env": "gspo/Dataset-v0",
        "env_kwargs": {
            "data": "rows.jsonl",
            "rewards": f"{ENVS}:matches",
            "system_prompt": "Say a word.",
        },
    },
    "compared": {
        "env": "gspo/Dataset-v0",
        "env_kwargs": {"data": "rows.jsonl", "rewards": (f"{ENVS}:matches", *JUDGES)},
    },
    "rated": {
        "env": "gspo/Dataset-v0",
        "env_kwargs": {"data": "rows.jsonl", "rewards": ("rater", f"{ENVS}:matches")},
    },
    "program": {
        "env": "gspo/Program-v0",
        "env_kwargs": {"program": f"{ENVS}:ask", "data": "rows.jsonl"},
    },
}
APART: dict[str, dict[str, Any]] = {
    "terminal": {
        "env": str(HERE / "pairs_terminal.py:Terminal"),
        "env_kwargs": {"folder": "tasks", "held_out": 0.5, "max_turns": 2},
    },
}
"""Environments of rows of `pairs_sets.py` alone."""
IDLE = {
    "learner.lora_alpha": "learner.lora_rank", "learner.lora_targets": "learner.lora_rank",
    "supply.min_success": "supply.max_resamples", "supply.max_success": "supply.max_resamples",
}  # fmt: skip
"""Settings that do nothing while another one has its usual value."""
OWN = ("old_logprobs", "aggregation", "ratio_level", "max_tokens")
"""Settings of a loss whose usual value stands for the loss's own."""
ASKING = ("Judged", "compared")
"""Environments that ask the judges of `pairs_judges.py`."""
EXACT = ("Words", "Final", "Both", "Masked", "Judged", "Edited", "several", "mixed", "lookup")
"""Environments with `blocking = False`, whose resumed runs have the bits of uninterrupted ones."""


# -- what there is to combine ----------------------------------------------------------------------


def domains() -> dict[str, list[Any]]:
    """Returns the values of each setting; those of a kind of choice are (name, settings)."""
    values: dict[str, list[Any]] = {"env": [*ENVIRONMENTS], "threads": [1, 2]}
    for kind in BUILTIN:
        if kind not in OTHER_KINDS:
            values[kind] = [
                (name, arguments)
                for name in sorted(BUILTIN[kind], key=lambda n: n != _usual(kind))
                if name not in ELSEWHERE.get(kind, ())
                for arguments in ARGUMENTS.get(kind, {}).get(name, ({},))
            ]
    for path, options in settings_with_options():
        values[path] = options
    return {name: options for name, options in values.items() if len(options) > 1}


@functools.cache
def _usual(kind: str) -> str:
    return {"tracker": "none"}.get(kind) or next(
        name for name in BUILTIN[kind] if isinstance(getattr(Config(), kind), find(kind, name))
    )


def settings_with_options() -> Iterator[tuple[str, list[Any]]]:
    """Yields the path and the values of each setting that chooses what is computed."""
    usual = flatten(Config())
    for path, hint in leaves():
        if path in NUMBERS:
            yield path, [*NUMBERS[path]]
        elif hint is bool:
            yield path, sorted([False, True], key=lambda v: v != usual.get(path, False))
        elif typing.get_origin(hint) is typing.Literal and len(typing.get_args(hint)) > 1:
            yield path, sorted(typing.get_args(hint), key=lambda v: v != usual.get(path))


def leaves(elsewhere: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields the path and the type of every setting once that is not listed as constant.

    Args:
        elsewhere: Whether the settings of choices are included that need a package.
    """
    seen = {path for paths in CONSTANT.values() for path in paths.split()}
    for path, hint in _leaves(Config, "", elsewhere):
        if path not in seen and path.partition(".")[0] + ".*" not in seen:
            seen.add(path)
            yield path, hint


def _leaves(cls: type, prefix: str, elsewhere: bool) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path, hint = f"{prefix}{field.name}", hints[field.name]
        if not prefix and field.name in BUILTIN:
            for name in BUILTIN[field.name]:
                if elsewhere or name not in ELSEWHERE.get(field.name, ()):
                    yield from _leaves(find(field.name, name), f"{field.name}.", elsewhere)
        elif dataclasses.is_dataclass(hint):
            yield from _leaves(typing.cast(type, hint), f"{path}.", elsewhere)
        else:
            yield path, hint


def unlisted() -> list[str]:
    """Returns the settings and choices that nobody has decided about, and those that are gone."""
    options, every = dict(settings_with_options()), {path for path, _ in _leaves(Config, "", True)}
    names = [path for path, _ in leaves(True) if path not in options and not _single(path)]
    listed = [path for paths in CONSTANT.values() for path in paths.split()] + [*NUMBERS]
    names += [path for path in listed if path not in every and not path.endswith(".*")]
    rows = [row for each in SETS.values() for row in each.rows.values()]
    played = {path for row in rows for path in row}
    played |= {f"engine.{key}" for row in rows for key in row.get("engine", ("", {}))[1]}
    names += [path for path in CONSTANT["`pairs_sets.py` has it"].split() if path not in played]
    for kind, choices in BUILTIN.items():
        for name in choices:
            if kind in OTHER_KINDS or name in ELSEWHERE.get(kind, ()):
                continue
            if name in ARGUMENTS.get(kind, {}):
                continue
            try:
                choice = find(kind, name)()
                if kind == "advantage":
                    choice.check()
            except (TypeError, ConfigError):
                names.append(f"{kind} {name}")
    return names


def _single(path: str) -> bool:
    """Returns whether a setting has one value in some choice and so none to choose."""
    return any(p == path and len(typing.get_args(h)) == 1 for p, h in leaves())


# -- a row -----------------------------------------------------------------------------------------

Row = dict[str, Any]


def tree(row: Row) -> dict[str, Any]:
    """Returns the changes of the base that a row makes; a choice takes the settings that it has."""
    changes: dict[str, Any] = {**(ENVIRONMENTS | APART)[row["env"]]}
    for kind in BUILTIN:
        name, arguments = row.get(kind, ("none", {}))
        if kind in row:
            changes[kind] = {"name": name, **arguments}
    flat: dict[str, Any] = {}
    for path, value in row.items():
        section, _, name = path.rpartition(".")
        if path in ("env", "threads", *BUILTIN):
            continue
        if section in BUILTIN:
            if not _has_value(section, row.get(section, (_usual(section), {})), path, value):
                continue
            if name in OWN and value == _default(path):
                continue
        flat[path] = value
    for path, value in flat.items():
        place = changes
        *sections, name = path.split(".")
        for section in sections:
            place = place.setdefault(
                section, {"name": _usual(section)} if section in BUILTIN else {}
            )
        place[name] = value
    if row.get("rollout.isolation") == "process":
        # a process takes a second, and one with a reward model takes ten
        changes.setdefault("rollout", {})["concurrency"] = 1 if row["env"] == "rated" else 2
    return changes


@functools.cache
def _default(path: str) -> Any:
    return flatten(Config()).get(path)


def config(row: Row) -> Config:
    """Returns the settings of a row."""
    base = override(Config(model="start"), {**BASE, "tracker": "none"})
    return override(base, {**tree(row), "output": "run"})


def usual_row() -> Row:
    """Returns the usual value of each setting."""
    return {name: values[0] for name, values in domains_cache().items()}


def differing(row: Row) -> Row:
    """Returns what differs from the usual values."""
    values = domains_cache()
    return {name: v for name, v in row.items() if v != values.get(name, [None])[0]}


domains_cache = functools.cache(domains)


def title(row: Row) -> str:
    """Returns what differs from the usual values, as text."""
    parts = []
    for name, value in differing(row).items():
        if isinstance(value, tuple):
            value = value[0] + "".join(
                f" {k}={v}" for k, v in value[1].items() if k != "instruction"
            )
        parts.append(f"{name}={value}")
    return ", ".join(parts) or "the usual settings"


def refusal(row: Row) -> str:
    """Returns the sentence with which a row is refused before anything is played; empty if not."""
    child = {ISOLATED: "1"} if row["rollout.isolation"] == "process" else {}
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            unittest.mock.patch.dict(os.environ, child),  # a real child process takes seconds
        ):
            agent = GSPOAgent(config=config({**row, "rollout.isolation": "thread"}))
            check_learning(agent.model, agent.config, agent.chat)
            envs = agent.environments
            envs.guard(check_settings, agent.config, envs.envs)
            check = functools.partial(check_start, undemonstrated=())
            envs.guard(check, agent.config, envs.envs, agent.chat)
            envs.close()
    except (ConfigError, TrainingError) as error:
        return str(error)
    except GspoEnvError:
        return ""  # it is wrong, and the row shows it
    return ""


def play(row: Row, start: Path) -> dict[str, Any]:
    """Plays a row in the working folder; returns how it ended."""
    if row.get("threads", 1) == 1:
        os.environ["OMP_NUM_THREADS"] = "1"
    figure: Any = importlib.import_module("matplotlib.figure").Figure
    figure.savefig = lambda *_, **__: None  # a quarter of the time
    stage, begun = "check", time.process_time()
    if row["env"] in ASKING:
        importlib.import_module("pairs_judges").serve()
    try:
        agent = GSPOAgent(config=config(row))
        stage = "train"
        record_updates(Path("notes.json"))
        agent.train()
        run = Path("run")
        shutil.copy("notes.json", run / "notes.json")
        stage = "oracle"
        faults = Run(run, start, start.with_name("teacher")).check()
        stage = "resume"
        faults += resumed(row, run)
        for command, work in commands(row, run).items():
            stage = command
            faults += work() or []
    except GspoEnvError as error:
        text = f"{type(error).__name__}: {error}"
        settings = isinstance(error, ConfigError | TrainingError) and stage in ("check", "train")
        how = "refused" if settings else "wrong"
        if settings and Path("run/metrics.jsonl").exists():
            how = "refused late"
        return {"end": how, "text": text, "stage": stage, "cpu": time.process_time() - begun}
    except BaseException:
        return {
            "end": "wrong", "text": traceback.format_exc()[-3000:], "stage": stage,
            "cpu": time.process_time() - begun,
        }  # fmt: skip
    end = "wrong" if faults else "done"
    return {"end": end, "text": "\n".join(faults[:6]), "count": len(faults), "stage": "oracle",
            "cpu": time.process_time() - begun}  # fmt: skip


def record_updates(file: Path) -> None:
    """Lets the run note which episodes each minibatch has, and the advantages in float64."""
    from gspo_env.learner import learner
    from gspo_env.training import loop

    notes: dict[str, Any] = {"minibatches": [], "advantages": []}
    split, estimate = learner.split, loop.estimate

    def noting_split(*args: Any, **kwargs: Any) -> Any:
        parts = split(*args, **kwargs)
        numbers = [list(dict.fromkeys(sample.episode for sample in part)) for part in parts]
        if notes["minibatches"]:  # and not what is measured before the first step
            notes["minibatches"][-1] = numbers
            file.write_text(json.dumps(notes))
        return parts

    def noting_estimate(*args: Any, **kwargs: Any) -> Any:
        credit = estimate(*args, **kwargs)
        notes["advantages"].append([[row.tolist() for row in g] for g in credit.advantages])
        notes["minibatches"].append(None)
        file.write_text(json.dumps(notes))
        return credit

    learner.split, loop.estimate = noting_split, noting_estimate


def resumed(row: Row, run: Path) -> list[str]:
    """Repeats the last step, as after a kill; returns in what the run differs then."""
    whole = Path("whole")
    shutil.copytree(run, whole, symlinks=True)
    last = max((run / "checkpoints").glob("step-*")).name
    shutil.rmtree(run / "checkpoints" / last)
    shutil.rmtree(run / "model")
    GSPOAgent.resume(run).train()
    exact = row["env"] in EXACT and not row.get("supply.max_staleness")
    exact = exact and not row.get("engine", ("",))[0].startswith("vllm")
    if not exact or row.get("rollout.isolation") == "process":
        return []
    files = [
        [load_file(f) for f in sorted(r.glob(f"checkpoints/{last}/state-*"))] for r in (whole, run)
    ]
    for first, second in zip(*files, strict=True):
        if off := [n for n in first if n not in second or not torch.equal(first[n], second[n])]:
            return [f"the resumed run differs in {off[0]} and {len(off) - 1} more tensors"]
    values = [points(r) for r in (whole, run)]
    off = [k for k in {**values[0], **values[1]} if values[0].get(k) != values[1].get(k)]
    return [f"the resumed run differs in {sorted(off)[:4]}"] if off else []


def points(run: Path) -> dict[str, list[float]]:
    """Returns the values of each step and metric that does not measure the machine."""
    values: dict[str, list[float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        point = json.loads(line)
        for name, value in point["metrics"].items():
            if not re.search("time/|per_second|system/|failed_saves|_requests$", name):
                values.setdefault(f"{point['step']} {name}", []).append(value)
    return values


def commands(row: Row, run: Path) -> dict[str, Any]:
    """Returns the commands to try on a run; each returns what is wrong."""

    def quiet(command: Any) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            command.run()
        return out.getvalue()

    def rescore() -> list[str]:
        rewards = ENVIRONMENTS[row["env"]]["env_kwargs"]["rewards"]
        rewards = (rewards,) if isinstance(rewards, str) else rewards
        bound = 1e-6 if row["env"] == "rated" else 1e-9  # it rates some at a time, in float32
        quiet(Rescore(folder=str(run), rewards=rewards, out="rescored.jsonl"))
        lines = [json.loads(line) for line in Path("rescored.jsonl").read_text().splitlines()]
        off = [x for x in lines if x["error"] or abs(x["before"] - x["now"]) > bound]
        return [f"rescored: {off[0]} and {len(off) - 1} more"] if off or not lines else []

    def sync() -> list[str]:
        text = quiet(Sync(folder=str(run)))
        return [] if "has everything" in text else [f"sync: {text}"]

    def replay() -> list[str]:
        oldest = min(folder.name for folder in (run / "batches").iterdir())
        text = quiet(parse(["replay", str(run), "--step", str(int(oldest[5:]))]))
        return [] if "to the last digit" in text else [f"replay: {text}"]

    def whatif() -> list[str]:
        arm = "learner.max_grad_norm=0.5,0.25"  # the run's own, and one that leaves the gradient
        quiet(parse(["whatif", str(run), "--arm", arm, "--json", "whatif.json"]))
        own, *others = json.loads(Path("whatif.json").read_text()).values()
        off = [
            (name, own[name], other[name])
            for other in others
            for name in ("norm", "cosine", "turned_tokens", "turned_turns")
            if other[name] != own[name]
        ]
        straight = own["cosine"] is None or abs(own["cosine"] - 1) < 1e-6
        return [f"whatif: {own}, {off}"] if off or not straight or own["turned_tokens"] else []

    def rewind() -> list[str]:
        try:
            text = quiet(parse(["rewind", str(run), "--by", "kept"]))
        except RolloutError as error:
            refused = row["env"] in (
                "Ranked",
                *ASKING,
            ) and "group_reward compares whole groups" in str(error)
            return [] if refused else [f"rewind: {error}"]
        return [] if "kept      outcome" in text else [f"rewind: {text}"]

    works: dict[str, Any] = {
        "diagnose": lambda: [] if quiet(Diagnose(folder=str(run))) else ["diagnose is silent"],
        "view": lambda: quiet(View(folder=str(run), browser=False)) and [],
        "evaluate": lambda: [] if "success" in quiet(Evaluate(folder=str(run))) else ["evaluate"],
    }
    if (run / "batches").exists() and any((run / "batches").iterdir()):
        works["replay"] = replay
        if row.get("episodes.keep_batches") == "all":
            works |= {"whatif": whatif, "rewind": rewind}
    if row["env"] in ("dataset", "compared", "rated"):
        works["rescore"] = rescore
    if row.get("tracker", ("none",))[0] != "none":
        works["sync"] = sync
    return works


# -- the rows --------------------------------------------------------------------------------------


Forbidden = dict[str, list[Any]]
"""Values of two settings or more, none of which goes with another."""


def covering(
    size: int, seed: int, refused: Sequence[Forbidden], done: Sequence[Row] = ()
) -> tuple[list[Row], list[Row]]:
    """Returns rows that have every combination of so many values, and those that no row can have.

    A choice's setting is unusual only in rows whose choice has it.

    Args:
        size: How many settings a combination has.
        seed: Draws the order of the settings.
        refused: What no row may have.
        done: Rows whose combinations need no other row.
    """
    values, draw = domains_cache(), random.Random(seed)
    where = {name: n for n, name in enumerate(values)}
    bans = [
        {where[n]: {values[n].index(v) for v in options} for n, options in ban.items()}
        for ban in [*refused, *ownership()]
    ]
    banned = {n: [ban for ban in bans if n in ban] for n in where.values()}

    def fits(row: dict[int, int], n: int) -> bool:
        return not any(all(row.get(k, -1) in v for k, v in ban.items()) for ban in banned[n])

    def combos(row: dict[int, int], n: int | None = None) -> Iterator[tuple[Any, ...]]:
        others = sorted(item for item in row.items() if item[0] != n)
        for rest in itertools.combinations(others, size if n is None else size - 1):
            yield rest if n is None else tuple(sorted([*rest, (n, row[n])]))

    def filled(row: dict[int, int]) -> dict[int, int] | None:
        rest = [n for n in where.values() if n not in row]
        draw.shuffle(rest)
        for n in sorted(rest, key=lambda n: [*values][n] not in BUILTIN):
            options = [o for o in range(len(values[[*values][n]])) if fits({**row, n: o}, n)]
            if not options:
                return None
            gains = {o: sum(c in missing for c in combos({**row, n: o}, n)) for o in options}
            best = max(gains.values())
            row[n] = draw.choice([o for o in options if gains[o] == best])
        return row

    every = [(where[n], range(len(options))) for n, options in values.items()]
    missing = dict.fromkeys(
        tuple(zip([n for n, _ in each], picks, strict=True))
        for each in itertools.combinations(every, size)
        for picks in itertools.product(*(options for _, options in each))
    )
    for row in done:
        for combo in combos({where[n]: values[n].index(v) for n, v in row.items()}):
            missing.pop(combo, None)
    rows, without = [], []
    while missing:
        first = next(iter(missing))
        start = dict(first)
        possible = all(fits(start, n) for n in start)
        row = next(filter(None, (filled({**start}) for _ in range(9 * possible))), None)
        named = {[*values][n]: values[[*values][n]][o] for n, o in sorted((row or start).items())}
        (without if row is None else rows).append(named)
        for combo in combos(row) if row else [first]:
            missing.pop(combo, None)
    return rows, without


def ownership() -> list[Forbidden]:
    """Returns each unusual value that does nothing, with the choices that lack it."""
    values = domains_cache()
    result: list[Forbidden] = [
        {owner: values[owner][:1], path: values[path][1:]}
        for path, owner in IDLE.items()
        if path in values
    ]
    for path, options in domains_cache().items():
        section = path.rpartition(".")[0]
        for value in options[1:] if section in BUILTIN else ():
            lacking = [v for v in choices(section) if not _has_value(section, v, path, value)]
            result.append({section: lacking, path: [value]} if section in domains_cache() else {})
    return [ban for ban in result if ban and all(ban.values())]


def choices(kind: str) -> list[Any]:
    """Returns the values of a choice."""
    return domains_cache().get(kind, [(_usual(kind), {})])


def _has_value(kind: str, choice: Any, path: str, value: Any) -> bool:
    setting = path.rpartition(".")[2]
    hint = _hints(kind, choice[0]).get(setting)
    literal = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else (value,)
    return hint is not None and value in literal and setting not in choice[1]


@functools.cache
def _hints(kind: str, name: str) -> dict[str, Any]:
    return typing.get_type_hints(find(kind, name))


def forbidden(folder: Path) -> list[tuple[Forbidden, str]]:
    """Returns the combinations that are refused at once, each with a sentence of one of them.

    Those of the table in docs/reference.md are tried first.
    """
    os.chdir(folder)
    refused: list[tuple[Forbidden, str]] = []
    for ban, _ in read_matrix():
        sentences = [refusal(usual_row() | combination) for combination in combinations(ban)]
        if all(sentences):
            refused.append((ban, sentences[0]))
    for turn in range(9):
        size = len(refused)
        for row in covering(2, turn, [ban for ban, _ in refused])[0]:
            bans = [ban for ban, _ in refused]
            if not matches(row, bans) and refusal(row):
                ban = widest(smallest(row, bans), bans)
                refused.append((ban, refusal(usual_row() | combinations(ban)[0])))
                print(refused[-1], file=sys.stderr, flush=True)
        if len(refused) == size:
            break
    return refused


def combinations(ban: Forbidden) -> list[Row]:
    """Returns the values of a refused combination, one of each setting."""
    return [dict(zip(ban, picks, strict=True)) for picks in itertools.product(*ban.values())]


def matches(row: Row, bans: Sequence[Forbidden]) -> bool:
    """Returns whether one of some combinations is in a row."""
    return any(all(row[n] in values for n, values in ban.items()) for ban in bans)


def smallest(row: Row, bans: Sequence[Forbidden]) -> Row:
    """Returns a row with as few unusual values as are refused, for a reason that is not known."""
    row = dict(row)
    for name in row:
        usual = {**row, name: domains_cache()[name][0]}
        if usual != row and not matches(usual, bans) and refusal(usual):
            row = usual
    return row


def widest(row: Row, bans: Sequence[Forbidden]) -> Forbidden:
    """Returns the values that are refused with each other, of which a row has some."""
    values = domains_cache()

    def new(name: str, value: Any) -> bool:
        changed = {**row, name: value}
        return not matches(changed, bans) and bool(refusal(changed))

    usual = [n for n in row if row[n] == values[n][0]]
    names = [n for n in row if n not in usual or not all(new(n, v) for v in values[n][1:])]
    return {n: [v for v in values[n] if new(n, v)] for n in names}


def prepare(folder: Path, layers: int = 0, hidden_size: int = 32) -> None:
    """Makes what all rows begin with: a model, a teacher, a reward model and a dataset.

    Args:
        folder: Where it is kept.
        layers: How many layers of SmolLM2 the model has; 0 imitates with a tiny model.
        hidden_size: Of the tiny model.
    """
    os.chdir(folder)
    pairs_envs.rows(Path("rows.jsonl"))
    pairs_terminal.tasks(Path("tasks"))
    if layers:
        model, tokenizer = load_model("smollm2", "float32")
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        model.save_pretrained("start")
        tokenizer.save_pretrained("start")
    else:
        imitate(hidden_size)
    shutil.copytree("start", "teacher")
    generator = torch.Generator().manual_seed(1)
    weights = load_file("start/model.safetensors")
    others = {
        n: w + 0.1 * w.std() * torch.randn(w.shape, generator=generator) for n, w in weights.items()
    }
    save_file(others, "teacher/model.safetensors", {"format": "pt"})
    torch.manual_seed(2)
    rater = AutoModelForSequenceClassification.from_pretrained("start", num_labels=1)
    rater.save_pretrained("rater")
    AutoTokenizer.from_pretrained("start").save_pretrained("rater")


def imitate(hidden_size: int) -> None:
    """Makes a tiny model that has seen the environments."""
    shown = [*(f"{n}={ENVS}:{n}" for n in ("Words", "Edited", "Long")), "gspo/Lookup-v0"]
    settings = Config.from_recipe(
        env=(*shown, "gspo/Dialogue-v0"),
        rollout={"max_turn_tokens": 32},
        recipe={
            **{
                "name": "tiny",
                "hidden_size": hidden_size,
                "layers": 2,
                "heads": 2,
                "demonstrations": 300,
            },
            **{"imitation_steps": 60, "imitation_learning_rate": 1e-2, "imitation_batch": 32},
        },
        eval_tasks=5,
    )
    agent = GSPOAgent(config=settings)
    agent.warm_up()
    agent.model.save_pretrained("start")
    agent.tokenizer.save_pretrained("start")
    agent.close()


def apart(work: Callable[[], object]) -> None:
    """Does work in a fork: threads that this process had would be missing in the forks of rows."""
    process = os.fork()
    if not process:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    if os.waitpid(process, 0)[1]:
        raise SystemExit(1)


def in_fork(row: Row, folder: Path, number: int, plant: str = "") -> dict[str, Any]:
    """Plays a row in a process of its own; returns how it ended."""
    process, place = begin(row, folder, number, plant)
    _, status = os.waitpid(process, 0)
    return end(process, place, status)


def begin(
    row: Row, folder: Path, number: int, plant: str = "", seconds: int = LIMIT
) -> tuple[int, Path]:
    """Begins to play a row in a process of its own; returns the process and its folder."""
    place = folder / f"row-{number}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    if (folder / "store.db").exists():  # the tables of MLflow, which take seconds to make
        shutil.copy(folder / "store.db", place)
    for name in ("start", "teacher", "rater", "rows.jsonl", "tasks"):
        (place / name).symlink_to(folder / name)
    process = os.fork()
    if process:
        return process, place
    os.setsid()
    log = os.open(place / "log.txt", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(place)
    signal.alarm(seconds)
    result: dict[str, Any] = {"end": "wrong", "text": "no result", "stage": "", "cpu": 0.0}
    try:
        if plant:
            from pairs_plants import PLANTS

            PLANTS[plant].put()
        result = play(row, folder / "start")
    finally:
        (place / "result.json").write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)


def end(process: int, place: Path, status: int) -> dict[str, Any]:
    """Returns how a row ended, whose process has; what it has started ends too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if not (place / "result.json").exists():
        return {"end": "wrong", "text": f"the process ended with {status}", "stage": "", "cpu": 0.0}
    result = json.loads((place / "result.json").read_text())
    if result["end"] != "wrong":
        shutil.rmtree(place)
    return typing.cast(dict[str, Any], result)


def main() -> None:
    """Plays rows and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=0, help="play so many; 0 plays all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the rows")
    parser.add_argument("--jobs", type=int, default=2, help="rows that are played at a time")
    parser.add_argument(
        "--results",
        default="",
        help="append to this file; combinations that are done there are not played again, rows "
        "that were wrong are",
    )
    parser.add_argument("--triples", action="store_true")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--plant", action="store_true")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--matrix", action="store_true")
    parser.add_argument("--sets", nargs="+", choices=SETS, help="play rows that need a package")
    parser.add_argument("--folder", default="", help="keep the rows that went wrong here")
    parser.add_argument(
        "--set", nargs="*", default=[], help="play one row: env=Words loss.kl_coef=0.05"
    )
    options = parser.parse_args()
    for name in ("matplotlib.figure", "mlflow.tracking", "peft"):
        importlib.import_module(name)  # once, and not in each row
    os.environ.pop("OMP_NUM_THREADS", None)  # rows have one thread or two
    torch.set_num_threads(1)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="pairs-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "start").exists():
        apart(lambda: prepare(folder))
    os.chdir(folder)
    if options.sets:
        sys.exit(play_sets(options.sets, folder))
    if options.set:
        row = usual_row()
        for each in options.set:
            name, _, text = each.partition("=")
            row[name] = next(
                v for v in domains_cache()[name] if str(v[0] if isinstance(v, tuple) else v) == text
            )
        print(json.dumps(result := in_fork(row, folder, 0), indent=1).replace("\\n", "\n"))
        sys.exit(result["end"] == "wrong")
    if options.published:
        sys.exit(play_published(folder))
    if options.matrix:
        apart(lambda: print(matrix(forbidden(folder))))
        return
    refused = read_matrix()
    bans = [ban for ban, _ in refused]
    past = read_results(Path(options.results)) if options.results else []
    done = [row for row, how in past if how == "done"]
    rows = [row for row, how in past if how == "wrong"]
    size = 3 if options.triples else 2
    more, without = covering(size, options.seed, bans, [*done, *rows])
    rows += more
    print(f"{len(rows)} rows; {len(without)} combinations of {size} values are in none", flush=True)
    apart(lambda: check_table(refused, [] if options.triples else rows))
    if options.plant:
        sys.exit(plant_all(rows, folder))
    if options.rows or options.triples:
        random.Random(options.seed).shuffle(rows)
        rows = rows[: options.rows or len(rows)]
    seconds = options.hours * 3600 if options.triples else 1e9
    wrong = play_all(rows, folder, options.jobs, seconds, options.results)
    if not options.rows and not options.triples:
        wrong |= play_sets([name for name in SETS if not SETS[name].layers], folder)
    sys.exit(wrong)


def read_results(file: Path) -> list[tuple[Row, str]]:
    """Returns the rows of a file of results whose values still exist, and how they last ended.

    They had the usual value of a setting that is new.
    """
    ends: dict[str, tuple[Row, str]] = {}
    texts = {n: {json.dumps(v): v for v in options} for n, options in domains_cache().items()}
    for line in file.read_text().splitlines() if file.exists() else ():
        result = json.loads(line)
        result["row"] = {**usual_row(), **result["row"]}
        row = {n: texts[n].get(json.dumps(result["row"][n]), texts) for n in texts}
        if texts not in row.values():
            ends[json.dumps(row)] = row, result["end"]
    return [*ends.values()]


def check_table(refused: Sequence[tuple[Forbidden, str]], rows: Sequence[Row]) -> None:
    """Raises SystemExit if the table has what is not refused, or lacks what is, or is not clear."""
    faults = []
    for ban, sentence in refused:
        print(f"  refused: {sentence}", flush=True)
        if refusal(usual_row() | combinations(ban)[0]) != sentence:
            faults.append(f"not refused so: {ban}")
        if not is_clear(ban, sentence):
            faults.append("the sentence does not name two of the settings, or not what to change")
    faults += [f"not in the table: {sentence}" for row in rows if (sentence := refusal(row))]
    if faults:
        print(*faults, "python stress/pairs.py --matrix makes the table", sep="\n", flush=True)
        raise SystemExit(1)


def play_all(rows: Sequence[Row], folder: Path, jobs: int, seconds: float, results: str) -> int:
    """Plays rows, some at a time; returns 1 if one is wrong."""
    until, counts = time.monotonic() + seconds, dict.fromkeys(("done", "refused", "wrong"), 0)
    late, running, cpu = dict[str, str](), dict[int, tuple[int, Path]](), 0.0
    waiting = [*enumerate(rows)]
    while running or (waiting and time.monotonic() < until):
        while waiting and len(running) < jobs and time.monotonic() < until:
            number, row = waiting.pop(0)
            process, place = begin(row, folder, number)
            running[process] = number, place
        process, status, used = os.wait3(0)
        number, place = running.pop(process)
        result = end(process, place, status)
        cpu += used.ru_utime + used.ru_stime
        counts[result["end"].partition(" ")[0]] += 1
        if results:
            with Path(results).open("a") as file:
                file.write(json.dumps({**result, "row": rows[number]}) + "\n")
        if result["end"].startswith("refused"):
            late[result["text"]] = title(rows[number])
        if result["end"] == "wrong":
            where = f"row {number} is wrong ({result['stage']}): {title(rows[number])}"
            print(f"{where}\n{result['text']}", flush=True)
    for sentence, name in late.items():
        print(f"refused: {sentence}\n  in {name}")
    played = sum(counts.values())
    print(f"{played} of {len(rows)} rows, {cpu / max(1, played):.1f} s of CPU each: {counts}")
    return int(counts["wrong"] > 0 or not played)


def play_sets(names: Sequence[str], folder: Path) -> int:
    """Plays the rows of sets whose packages are installed; returns 1 if one is wrong."""
    wrong = 0
    for each in names:
        rows, missing = (
            SETS[each],
            [name for name in SETS[each].packages if not (find_spec(name) or shutil.which(name))],
        )
        if missing:
            print(f"{each}: left out, because {' and '.join(missing)} is not installed", flush=True)
            continue
        start = folder / f"{rows.layers}-{rows.hidden_size}"
        if not start.exists():
            start.mkdir()
            apart(functools.partial(prepare, start, rows.layers, rows.hidden_size))
        for number, (name, settings) in enumerate(rows.rows.items()):
            few = {"tasks_per_step": 1, "rollout.group_size": 2} if rows.layers else {}
            process, place = begin(usual_row() | few | settings, start, number, seconds=1800)
            result = end(process, place, os.waitpid(process, 0)[1])
            wrong += result["end"] == "wrong"
            what = f"{result['end']} {result['text']} ({result['cpu']:.0f} s)"
            print(f"{each}, {name}: {what}", flush=True)
    return int(wrong > 0)


def play_published(folder: Path) -> int:
    """Plays published combinations; returns 1 if one is wrong."""
    from pairs_published import PUBLISHED

    wrong = 0
    for name, each in PUBLISHED.items():
        chosen = {k: (v, {}) if k in BUILTIN else v for k, v in each.settings.items()}
        row = usual_row() | chosen
        result = in_fork(row, folder, 0)
        wrong += result["end"] == "wrong"
        lacking = f"; lacking: {each.lacking}" if each.lacking else ""
        print(f"{name}: {result['end']} {result['text']}{lacking}", flush=True)
    return int(wrong > 0)


def plant_all(rows: Sequence[Row], folder: Path) -> int:
    """Plays rows with each of the planted faults until one is wrong; returns 1 if none is."""
    from pairs_plants import PLANTS

    missed = 0
    for name, plant in PLANTS.items():
        fit = {f"row {n}": row for n, row in enumerate(rows) if _has(row, plant.needs)}
        chosen = dict([*fit.items()][:2]) | {"the usual row": _planted_row(plant.needs)}
        caught = ""
        for which, row in chosen.items():
            if in_fork(row, folder, 0)["end"] != "done":
                continue
            result = in_fork(row, folder, 0, name)
            if result["end"] != "done":
                caught = f"{which} ({title(row)}): {result['text'].splitlines()[0]}"
                break
        missed += not caught
        print(f"{name}: {caught or f'NOT CAUGHT by {[*chosen]}'}", flush=True)
    return int(missed > 0)


def _planted_row(needs: Mapping[str, Any]) -> Row:
    """Returns the usual values, with those that a planted fault needs."""
    row = usual_row()
    for name, need in needs.items():
        wanted = need.split() if isinstance(need, str) else need
        wanted = wanted if isinstance(wanted, list | tuple) else [wanted]
        row[name] = next(
            v for v in domains_cache()[name] if (v[0] if isinstance(v, tuple) else v) in wanted
        )
    return row


def _has(row: Row, needs: Mapping[str, Any]) -> bool:
    """Returns whether a row has one of the values of each setting that a planted fault needs."""
    if row["rollout.max_turns"] == 1 or row["model_dtype"] in ("bfloat16", "float16"):
        return False
    values = {n: v[0] if isinstance(v, tuple) else v for n, v in row.items()}
    return all(
        values[n] in (v.split() if isinstance(v, str) else v if isinstance(v, tuple) else (v,))
        for n, v in needs.items()
    )


def is_clear(ban: Forbidden, sentence: str) -> bool:
    """Returns whether a sentence names two of the settings, or the only one, and what to change.

    It has the values as the user writes them, not the names of classes.
    """

    def is_named(name: str, values: Sequence[Any]) -> bool:
        texts = [v[0] if isinstance(v, tuple) else v for v in values]
        if name == "env":
            places = [str(ENVIRONMENTS[each]["env"]) for each in values]
            texts += [re.sub(r".*[/:]|-v\d+$", "", place) for place in places]
        words = [name.rpartition(".")[2], *(text for text in texts if isinstance(text, str))]
        return any(re.search(rf"\b{re.escape(word)}\b", sentence, re.I) for word in words)

    named = sum(is_named(name, values) for name, values in ban.items())
    advises = re.search(r"expected|use |raise |lower |name |--", sentence, re.I)
    classes = {place.rpartition(":")[2] for names in BUILTIN.values() for place in names.values()}
    spells = not classes.intersection(re.findall(r"'(\w+)'", sentence))
    return named >= min(2, len(ban)) and bool(advises) and spells


def matrix(refused: Sequence[tuple[Forbidden, str]]) -> str:
    """Returns the table of what cannot be combined."""
    lines = [
        f"| {' with '.join(f'`{n}` {_listed(n, v)}' for n, v in ban.items())} | {sentence} |"
        for ban, sentence in refused
    ]
    return "\n".join([HEAD, "|---|---|", *sorted(lines)])


def _listed(name: str, values: Sequence[Any]) -> str:
    """Returns values as text; a choice whose settings do not matter by its name alone."""
    domain = domains_cache()[name]

    def texts(chosen: Sequence[Any]) -> str:
        alone = [
            value if all(v in chosen for v in domain if v[0] == value[0]) else None
            for value in chosen
            if isinstance(value, tuple)
        ]
        words = [v[0] if v in alone else _texts(v)[-1] for v in chosen]
        return ", ".join(sorted(set(words)))

    others = "all but " + texts([v for v in domain if v not in values])
    return min(texts(values), others, key=len) if len(values) < len(domain) else texts(values)


def _texts(value: Any) -> list[str]:
    """Returns the name of a value, and the name with its settings if it has some."""
    if not isinstance(value, tuple):
        return [str(value)]
    return [value[0], " ".join([value[0], *(f"{k}={v}" for k, v in value[1].items())])]


def read_matrix() -> list[tuple[Forbidden, str]]:
    """Returns the combinations of the table in docs/reference.md, each with its sentence."""
    table = (HERE.parent / "docs/reference.md").read_text().partition(HEAD)[2].partition("\n\n")[0]
    refused = []
    for line in table.splitlines()[2:]:
        cells, _, sentence = line.strip("| ").partition(" | ")
        ban = {}
        for name, listed in re.findall(r"`([\w.]+)` (.*?)(?= with `|$)", cells):
            words = listed.removeprefix("all but ").split(", ")
            options = domains_cache().get(name, [])
            named = [v for v in options if any(text in words for text in _texts(v))]
            but = listed.startswith("all but ")
            ban[name] = [v for v in options if (v in named) != but]
        refused.append((ban, sentence))
    return refused


if __name__ == "__main__":
    main()
