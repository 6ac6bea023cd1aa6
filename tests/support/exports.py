"""Environments of every kind, scripted episodes of them, and their exported packages."""

import importlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from gspo_env.env.registration import make_env, register_builtin, resolve_env
from gspo_env.export import write_package
from gspo_env.rollout.play import demonstrator, play_now
from gspo_env.types import Episode, Task

FILE = Path(__file__)
ROWS = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)]
CHATS = [
    {
        "prompt": [
            {"role": "system", "content": "Count."},
            {"role": "user", "content": "One."},
            {"role": "assistant", "content": "Two."},
            {"role": "user", "content": f"Three? {n}"},
        ],
        "answer": "4",
    }
    for n in range(20)
]
ENVS = {
    "Lookup": ("gspo/Lookup-v0", {"hops": 2}),
    "Wordle": ("gspo/Wordle-v0", {}),
    "SQL": ("gspo/SQL-v0", {}),
    "Dialogue": ("gspo/Dialogue-v0", {}),
    "Dataset": ("gspo/Dataset-v0", {"data": ROWS, "rewards": f"{FILE}:matches"}),
    "Chats": ("gspo/Dataset-v0", {"data": CHATS, "rewards": f"{FILE}:matches"}),
    "Story": ("gspo/Story-v0", {}),
    "KeyDoor": ("gspo/KeyDoor-v0", {"turns": 3}),
    "file": (f"{FILE.with_name('export_shop.py')}:Shop", {"most": 3}),
}


def matches(attempt):
    return float(attempt.text == attempt.row["answer"])


@dataclass
class Talk:
    """An episode that was played here."""

    seed: int
    episode: Episode

    @property
    def actions(self):
        return [turn.text for turn in self.episode.turns]

    @property
    def observations(self):
        """What the policy reads, the last observation included."""
        return [*(turn.observation for turn in self.episode.turns), self.episode.final_observation]


def talks(name):
    """Two episodes of the demonstrator, or of right answers, and two of wrong actions."""
    register_builtin()
    spec, kwargs = ENVS[name]
    env, env_id = make_env(spec, **kwargs), resolve_env(spec)
    policies = (expert, wrong)
    played = [
        Talk(seed, play_now(env, Task(env_id=env_id, seed=seed), policy, max_turns=30))
        for policy in policies
        for seed in (3, 4)
    ]
    assert all(talk.episode.ending.ended for talk in played)
    assert {talk.episode.success for talk in played} == {True, False}
    return played


def expert(now):
    try:
        return demonstrator()(now)
    except NotImplementedError:
        number = now.observation.removeprefix("What is ").partition(" ")[0]
        return str(int(number) + 1) if number.isdecimal() else "4"


def wrong(now):
    return "Maybe later." if now.turn else "<answer>none</answer>"


def load_package(name, peer, folder, monkeypatch):
    """Exports an environment and imports the package."""
    spec, kwargs = ENVS[name]
    write_package(spec, peer, folder, **kwargs)
    package = next(p.parent.name for p in folder.glob("*/__init__.py"))
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop(package, None)
    return importlib.import_module(package)


def install(folder, site):
    """Builds the wheel of a package and unpacks it, as an installer does."""
    build = "import setuptools.build_meta as b; b.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = (folder / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site
