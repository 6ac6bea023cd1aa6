"""Runs five short trainings with another revision and with this one, and compares all metrics.

    python benchmarks/same_numbers.py REV

The other revision is checked out beside this one; each run is a process with one thread. All
metrics but times and rates must be equal to the last digit, and new ones are listed. Exit code 1
where one differs or is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

RENAMED: dict[str, str] = {}
"""Metrics by their old name."""

TINY = {"recipe": {"demonstrations": 300, "imitation_steps": 40}}
SHORT = {"steps": 4, "tasks_per_step": 8, "eval_every": 2, "eval_tasks": 16}
RUNS: dict[str, dict[str, Any]] = {
    "look-up": {**TINY, **SHORT, "advantage": {"scale": "std"}},
    "calculator, outcome, token ratio": {
        **TINY,
        **SHORT,
        "env": "gspo/Calculator-v0",
        "seed": 1,
        "advantage": {"name": "outcome", "scale": "batch"},
        "loss": {"ratio_level": "token", "clip_low": 0.2, "clip_high": 0.27},
    },
    "key and door, group_gae": {
        **TINY,
        **SHORT,
        "env": "gspo/KeyDoor-v0",
        "advantage": {"name": "group_gae", "lam": 0.9, "scale": "std"},
        "loss": {"ratio_level": "turn", "kl_coef": 0.01},
    },
    "dataset": {
        **TINY,
        **SHORT,
        "env": "gspo/Dataset-v0",
        "env_kwargs": {"data": "sums.jsonl", "rewards": ["reward.py:exact"], "blocking": False},
        "advantage": {"scale": "std"},
        "learner": {"minibatches": 2},
    },
    "LoRA on a saved model": {
        **SHORT,
        "model": "saved",
        "advantage": {"scale": "std"},
        "rollout": {"max_turn_tokens": 32, "max_context": 512},
        "learner": {"lora_rank": 4, "learning_rate": 1e-3},
    },
}

REWARD = """
def exact(completions, answer, **_):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]
"""


def main() -> None:
    """Plays the runs in both revisions and prints the differences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("revision", help="such as HEAD~3 or a tag")
    parser.add_argument("--only", default="", help="play the runs whose name contains this")
    parser.add_argument("--play", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.play:
        print("HISTORY" + json.dumps(play(RUNS[arguments.play])))
        return
    names = [name for name in RUNS if arguments.only in name]
    with tempfile.TemporaryDirectory() as folder:
        beside = Path(folder) / "revision"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "-f", str(beside), arguments.revision], check=True)
        try:
            different = sum([report(name, played(name, beside), played(name)) for name in names])
        finally:
            subprocess.run([*git, "remove", "--force", str(beside)], check=True)
    sys.exit(min(different, 1))


def played(name: str, tree: Path = ROOT) -> list[Any]:
    """The history of a run with the package of a source tree."""
    paths = os.pathsep.join(str(tree / part) for part in (".", "envs", "agents"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "-", "--play", name],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
        )
    line = next((line for line in done.stdout.splitlines() if line.startswith("HISTORY")), None)
    if line is None:
        sys.exit(f"{name} failed in {tree}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(line.removeprefix("HISTORY"))


def play(tree: dict[str, Any]) -> list[Any]:
    """One training in the working folder; returns its (step, metrics) pairs."""
    from gspo_agents.gspo import GSPOAgent

    Path("reward.py").write_text(REWARD)
    sums = [(f"{a} plus {b}", str(a + b)) for a in range(9) for b in (2, 3, 4)]
    rows = [{"prompt": prompt, "completion": c, "answer": c} for prompt, c in sums]
    Path("sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    if tree.get("model"):
        teacher = GSPOAgent(config=make({**TINY, **SHORT}))
        teacher.warm_up()
        teacher.save(tree["model"])
    return GSPOAgent(config=make({**tree, "output": "run"})).train()


def make(tree: dict[str, Any]) -> Any:
    """A config that records nothing."""
    from gspo_env.config import from_dict

    return from_dict({**tree, "tracker": "none"})


def report(name: str, before: list[Any], after: list[Any]) -> int:
    """Prints what differs between two histories; returns how many metrics do."""
    renamed = [[step, {RENAMED.get(k, k): v for k, v in m.items()}] for step, m in before]
    shared = {metric for _, metrics in renamed for metric in metrics}
    added = sorted({metric for _, metrics in after for metric in metrics} - shared)
    after = [[step, {k: v for k, v in m.items() if k in shared}] for step, m in after]
    lines = list(differences(renamed, after))
    count = sum(len(list(exact(metrics))) for _, metrics in after)
    print(f"{name}: {count} values, {'equal' if not lines else 'DIFFERENT'}", flush=True)
    for line in lines[:20]:
        print(f"    {line}")
    if added:
        print(f"    new: {', '.join(added)}")
    return len(lines)


def differences(before: list[Any], after: list[Any]) -> Iterator[str]:
    """A line for each value that is not the same in both."""
    if [step for step, _ in before] != [step for step, _ in after]:
        yield f"steps {[step for step, _ in before]} and {[step for step, _ in after]}"
    for (step, old), (_, new) in zip(before, after, strict=False):
        ours, theirs = dict(exact(new)), dict(exact(old))
        for metric in sorted({*ours, *theirs}):
            if theirs.get(metric) != ours.get(metric):
                yield f"step {step}: {metric} was {theirs.get(metric)}, is {ours.get(metric)}"


def exact(metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The metrics that a seed decides."""
    for name, value in metrics.items():
        if not name.startswith("time/") and not name.endswith("_per_second"):
            yield name, value


if __name__ == "__main__":
    main()
