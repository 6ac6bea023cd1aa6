"""Trains runs that fail in known ways, and good ones, and prints what `gspo-env diagnose` says.

    python stress/faults.py [--only NAME] [--long] [--seed N] [--keep FOLDER]

A failing run is right if its cause is named first, a good one if nothing is named. Without
`--long`, the good runs are small ones of some seconds; with it, they are the default run and two
others of its length, which take some minutes each. Exit code 1 if a run is not right.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENVS = Path(__file__).resolve().with_name("fault_envs.py")
BACKWARDS = Path(__file__).resolve().parent.parent / "examples" / "backwards.py"

SMALL: dict[str, Any] = {
    "recipe": {
        **{"hidden_size": 32, "layers": 1, "demonstrations": 64, "imitation_batch": 16},
        **{"imitation_steps": 40, "imitation_learning_rate": 2e-2},
    },
    "steps": 10,
    "tasks_per_step": 4,
    "eval_every": 5,
    "eval_tasks": 32,
    "rollout": {"group_size": 8, "max_turn_tokens": 8, "max_context": 128},
    "learner": {"learning_rate": 2e-3, "warmup_steps": 4, "schedule": "constant"},
    "checkpoints": {"keep": 0},
    "tracker": "none",
}
"""A run of a few seconds that learns `Pick`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run and what is wrong with it."""

    name: str
    expected: str
    """The rule that has to come first; empty for a good run."""
    env: str = "Pick"
    changes: dict[str, Any] = field(default_factory=dict)
    stops: bool = False
    """Whether an error has to end the run."""
    varies: bool = False
    """Whether times or chance decide what is found, so that no test can ask for it."""

    @property
    def tree(self) -> dict[str, Any]:
        """The settings."""
        tree = {key: dict(v) if isinstance(v, dict) else v for key, v in SMALL.items()}
        for key, value in self.changes.items():
            tree[key] = tree[key] | value if isinstance(tree.get(key), dict) else value
        return {"env": f"{ENVS}:{self.env}", **tree}


FAILING = (
    Case(
        name="groups without variance",
        expected="no_variance",
        env="Same",
    ),
    Case(
        name="everything clipped",
        expected="clipped",
        changes={"loss": {"clip_low": 1e-6, "clip_high": 1e-6}},
    ),
    Case(
        name="malformed calls are paid",
        expected="tool_calls",
        env="Malformed",
        changes={
            "recipe": {"demonstrations": 400, "imitation_steps": 150, "hidden_size": 64},
            "rollout": {"max_turn_tokens": 24, "max_context": 384},
        },
    ),
    Case(
        name="repeated marks are paid",
        expected="control_tokens",
        env="Repeats",
        changes={
            "recipe": {"demonstrations": 1000, "imitation_steps": 400, "hidden_size": 64},
            "rollout": {"max_turn_tokens": 24, "max_context": 384},
            "steps": 16,
        },
    ),
    Case(name="another engine", expected="engine", changes={"engine": f"{ENVS}:Apart"}),
    Case(
        name="a small reward that is easy",
        expected="no_variance",
        env="Trap",
        changes={"steps": 24, "learner": {"learning_rate": 1e-2}},
    ),
    Case(name="impossible tasks", expected="no_variance", env="Hidden"),
    Case(
        name="learning rate too high",
        expected="collapse",
        changes={"learner": {"learning_rate": 0.1, "warmup_steps": 20}, "steps": 16},
    ),
    Case(
        name="no room for an answer",
        expected="truncated",
        env="Wordy",
        changes={"rollout": {"max_turn_tokens": 4}},
    ),
    Case(
        name="no room for a conversation",
        expected="truncated",
        env="Chatty",
        changes={"rollout": {"max_context": 80}},
    ),
    Case(name="too few turns", expected="truncated", changes={"rollout": {"max_turns": 2}}),
    Case(
        name="environment raises",
        expected="environment",
        env="Broken",
        changes={"rollout": {"max_retries": 0, "max_env_error_rate": 0.9}},
    ),
    Case(
        name="much played ahead, fast learner",
        expected="stale",
        varies=True,
        env="Late",
        changes={
            "supply": {"max_staleness": 8},
            "learner": {"learning_rate": 0.03},
            "loss": {"correction": "none"},
        },
    ),
    Case(
        name="loss is not a number",
        expected="failed",
        stops=True,
        changes={"loss": f"{ENVS}:Infinite"},
    ),
    Case(name="loss without gradient", expected="gradient", changes={"loss": f"{ENVS}:Frozen"}),
    Case(
        name="wrong words are paid",
        expected="hacking",
        env="Hack",
        changes={"eval_tasks": 96, "tasks_per_step": 8},
    ),
)
GOOD = (
    Case(name="small, outcome", expected="", changes={"advantage": "outcome"}),
    Case(name="small, GRPO", expected="", changes={"loss": "grpo", "seed": 1}),
    Case(name="small, late reward", expected="", env="Late", changes={"seed": 2}),
)
LONG: dict[str, dict[str, Any]] = {
    "default": {},
    "calculator": {"env": "gspo/Calculator-v0", "seed": 1},
    "backwards": {"env": f"{BACKWARDS}:Backwards"},
}
"""Good runs of the usual length, as changes to the default."""


def train(tree: dict[str, Any], folder: Path) -> None:
    """Trains a run in a folder.

    Raises:
        TrainingError: Its settings let it end so.
    """
    from gspo_agents.gspo import GSPOAgent
    from gspo_env.config import from_dict

    GSPOAgent(config=from_dict({**tree, "output": str(folder)})).train()


def play(name: str, tree: dict[str, Any], folder: Path, *, stops: bool = False) -> Path:
    """Trains a run; returns its folder."""
    from gspo_env.errors import TrainingError

    run = folder / name.replace(" ", "-").replace(",", "")
    try:
        train(tree, run)
    except TrainingError:
        if not stops:
            raise
    return run


def cases(only: str, *, long: bool) -> Iterator[tuple[str, str, dict[str, Any], bool]]:
    """Yields name, cause, settings and whether an error ends it of the runs to play."""
    for case in (*FAILING, *(() if long else GOOD)):
        if only not in f"{case.name} {case.expected}":
            continue
        yield case.name, case.expected, case.tree, case.stops
    for name, changes in LONG.items() if long else ():
        if only in f"{name} ":
            yield name, "", {**changes, "tracker": "none"}, False


def main() -> None:
    """Plays the runs and prints a row for each."""
    from gspo_env.health.diagnose import diagnose, lines
    from gspo_env.runs import Run

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="runs whose name or cause contains this")
    parser.add_argument("--long", action="store_true", help="good runs of the usual length")
    parser.add_argument("--seed", type=int, default=0, help="added to the seed of each run")
    parser.add_argument("--keep", default="", help="keep the runs in this folder")
    arguments = parser.parse_args()
    place = Path(arguments.keep or tempfile.mkdtemp(prefix="gspo-diagnose-"))
    wrong, rows = 0, []
    for name, expected, tree, stops in cases(arguments.only, long=arguments.long):
        tree["seed"] = tree.get("seed", 0) + arguments.seed
        started = time.monotonic()
        run = play(name, tree, place, stops=stops)
        diagnosis = diagnose(Run.open(run))
        names = [finding.name for finding in diagnosis.findings]
        right = names[:1] == ([expected] if expected else [])
        wrong += not right
        rows.append(
            (name, expected or "-", ", ".join(names) or "-", right, time.monotonic() - started)
        )
        print("\n".join(lines(diagnosis)), end="\n\n", flush=True)
    print(f"{'run':32} {'cause':14} {'findings':32} right  seconds")
    for name, expected, findings, right, seconds in rows:
        print(f"{name:32} {expected:14} {findings:32} {'yes' if right else 'NO':5} {seconds:8.1f}")
    for kind, rows_ in (
        ("failing", [r for r in rows if r[1] != "-"]),
        ("good", [r for r in rows if r[1] == "-"]),
    ):
        print(f"{kind}: {sum(row[3] for row in rows_)} of {len(rows_)} right")
    if not arguments.keep:
        shutil.rmtree(place)
    sys.exit(min(wrong, 1))


if __name__ == "__main__":
    main()
