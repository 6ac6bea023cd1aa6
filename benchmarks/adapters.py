"""Tests every environment of the adapters: random episodes, check_env, and speed.

    python benchmarks/adapters.py                              # all installed packages
    python benchmarks/adapters.py --only GEM --verbose         # with the name of each environment
    python benchmarks/adapters.py --write docs/adapters.md     # writes the table
    python benchmarks/adapters.py --only Dataset MCP SkyRL verifiers --write docs/bridges.md
    python benchmarks/adapters.py --only OpenEnv --write docs/bridges.md   # needs OpenEnv

An environment has run if each of its episodes ended or reached the limit of turns, with valid
values, within the time limit, and without an exception of ours or of the package.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import logging
import random
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gspo_env import make_env
from gspo_env.check import check_env, random_policy
from gspo_env.env.info import parse_reset, parse_step
from gspo_env.errors import ConfigError, MissingExtraError

EPISODES, TURNS, EPISODE_SECONDS, CHECK_SECONDS = 5, 100, 20, 60

TESTS = Path(__file__).parents[1] / "tests"
SUMS = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(50)]

Kwargs = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A row of the table: an adapter and its environments."""

    name: str
    package: str
    env_id: str
    environments: Callable[[], list[Kwargs]]
    """Returns the arguments of all its environments; called if the package is installed."""


@dataclass(kw_only=True)
class Row:
    adapter: Adapter
    version: str
    total: int = 0
    ran: int = 0
    checked: int = 0
    episodes: int = 0
    seconds: float = 0.0
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def gymnasium_ids() -> list[Kwargs]:
    names = "FrozenLake-v1 FrozenLake8x8-v1 CliffWalking-v1 CliffWalkingSlippery-v1 Taxi-v4"
    names += " Blackjack-v1 CartPole-v1 Acrobot-v1 MountainCar-v0 MountainCarContinuous-v0"
    return [{"env": name} for name in [*names.split(), "Pendulum-v1"]]


def textarena_games(single: bool) -> list[Kwargs]:
    """Games, without the ids that only add observation wrappers of TextArena."""
    from textarena.envs.registration import ENV_REGISTRY

    names = [name for name in ENV_REGISTRY if not name.endswith(("-train", "-raw"))]
    players = {name: count_players(name) for name in names}
    return [
        {"game": name} | ({} if single else {"players": count})
        for name, count in players.items()
        if (count == 1) == single
    ]


def count_players(game: str) -> int:
    """The smallest number of players that can start a game; TextArena does not list it."""
    # these start with one player and then wait for others
    several = ("QuantumTicTacToe", "SpiteAndMalice", "PublicGoodsGame", "MarketEntryGame")
    for count in (2, 3, 4) if game.startswith(several) else (1, 2, 3, 4, 5, 6, 8):
        with contextlib.suppress(ConfigError, MissingExtraError, OSError, ValueError):
            make_env("gspo/TextArena-v0", game=game, players=count).close()
            return count
    return 1


def reasoning_gym_tasks() -> list[Kwargs]:
    from reasoning_gym.factory import DATASETS

    return [{"task": name, "attempts": 3} for name in DATASETS]


def gem_tasks(mirror: bool) -> list[Kwargs]:
    """The tasks of GEM, or those that wrap reasoning-gym."""
    import gem.envs  # noqa: F401
    from gem.envs.registration import ENV_REGISTRY

    return [{"task": name} for name in ENV_REGISTRY if name.startswith("rg:") == mirror]


def mcp_servers() -> list[Kwargs]:
    command = [sys.executable, str(TESTS / "mcp_server.py")]
    offered = {"only": ["add", "divide"], "session": "process"}
    return [{"servers": {"workshop": command}, "data": SUMS, **offered}]


def skyrl_tasks() -> list[Kwargs]:
    """Tasks that need no database and no server, and run no code of the model."""
    rows = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "reward_spec": {"method": "rule", "ground_truth": row["answer"]},
            "reward_model": {"ground_truth": row["answer"]},
            "extra_info": {},
        }
        for row in SUMS
    ]
    return [{"task": name, "data": rows} for name in ("gsm8k", "gsm8k_multi_turn", "aime")]


def openenv_servers() -> list[Kwargs]:
    """A server in a separate process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(TESTS / "openenv_server.py"), str(port), "4"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    atexit.register(process.kill)
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        time.sleep(0.1)
    fields = {"action": "message", "observation": "text"}
    return [{"url": f"http://127.0.0.1:{port}", **fields}]


ADAPTERS = [
    Adapter(
        name="GymText",
        package="gymnasium",
        env_id="gspo/GymText-v0",
        environments=gymnasium_ids,
    ),
    Adapter(
        name="TextArena",
        package="textarena",
        env_id="gspo/TextArena-v0",
        environments=lambda: textarena_games(single=True),
    ),
    Adapter(
        name="TextArena, several players",
        package="textarena",
        env_id="gspo/TextArena-v0",
        environments=lambda: textarena_games(single=False),
    ),
    Adapter(
        name="reasoning-gym",
        package="reasoning-gym",
        env_id="gspo/ReasoningGym-v0",
        environments=reasoning_gym_tasks,
    ),
    Adapter(
        name="GEM",
        package="gem-llm",
        env_id="gspo/GEM-v0",
        environments=lambda: gem_tasks(mirror=False),
    ),
    Adapter(
        name="GEM, reasoning-gym tasks",
        package="gem-llm",
        env_id="gspo/GEM-v0",
        environments=lambda: gem_tasks(mirror=True),
    ),
]


ADAPTERS += [
    Adapter(name=name, package=package, env_id=f"gspo/{env_id}-v0", environments=environments)
    for name, package, env_id, environments in (
        ("Dataset", "gspo-env", "Dataset", lambda: [{"data": SUMS}]),
        ("MCP", "mcp", "MCP", mcp_servers),
        ("SkyRL-Gym", "skyrl-gym", "SkyRL", skyrl_tasks),
        ("verifiers", "verifiers", "Verifiers", lambda: [{"taskset": f"{TESTS}/vf_tasks.py:Sums"}]),
        ("OpenEnv", "openenv", "OpenEnv", openenv_servers),
    )
]


class PackageError(Exception):
    """The package raised on an action."""


class TooSlow(BaseException):
    """Not an Exception, so that no package catches it."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def play(env: Any, seed: int) -> None:
    """Plays one episode with a random policy; raises the exceptions of the package."""
    rng = random.Random(seed)
    observation, _ = parse_reset("environment", env.reset(seed=seed))
    for _ in range(TURNS):
        step = parse_step("environment", env.step(random_policy(rng, observation)))
        observation, _, terminated, truncated, info = step
        if "env_error" in info.extra:
            raise PackageError(info.extra["env_error"])
        if terminated or truncated:
            return


def try_out(row: Row, kwargs: Kwargs) -> None:
    """Plays and checks one environment; records a failure in its row."""
    name = str(next(iter(kwargs.values())))[:60]
    what = f"making it took over {EPISODE_SECONDS} s"
    env = None
    try:
        with within(EPISODE_SECONDS):
            env = make_env(row.adapter.env_id, **kwargs)
        what = f"an episode took over {EPISODE_SECONDS} s"
        for seed in range(EPISODES):
            started = time.perf_counter()
            with within(EPISODE_SECONDS):
                play(env, seed)
            row.seconds += time.perf_counter() - started
            row.episodes += 1
        row.ran += 1
        what = f"check_env took over {CHECK_SECONDS} s"
        with within(CHECK_SECONDS):
            check_env(env, episodes=1)
        row.checked += 1
    except TooSlow:
        row.faults[what].append(name)
    except Exception as error:
        row.faults[reason(error, name)].append(name)
    finally:
        if env is not None:
            env.close()


def reason(error: Exception, name: str) -> str:
    """A short text that is equal for equal faults of several environments."""
    text = " ".join(str(error).split())
    text = re.sub(rf"{re.escape(name)} (cannot be|needs)", r"\1", text)
    text = re.sub(r"cannot be (made|played by \d+)( with( arguments)? \{[^}]*\})?: ", "", text)
    text = re.sub(r"Could not import \S+ Error: ", "", text)
    text = re.sub(r" \(env.py, line \d+\)|: '?/\S+", "", text)  # and no folders of this machine
    kind = "" if isinstance(error, (ConfigError, MissingExtraError)) else type(error).__name__
    return f"{kind}: {text[:150]}".removeprefix(": ").replace("|", "\\|").replace("<", "&lt;")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides the output of packages; NLTK reports each failed download."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        yield
    logging.disable(logging.NOTSET)


def measure(adapter: Adapter, verbose: bool) -> Row | None:
    try:
        row = Row(adapter=adapter, version=version(adapter.package))
    except PackageNotFoundError:
        print(f"{adapter.name}: {adapter.package} is not installed, left out")
        return None
    with quiet():
        environments = adapter.environments()
    row.total = len(environments)
    for kwargs in environments:
        started, ran, checked = time.perf_counter(), row.ran, row.checked
        with quiet():
            try_out(row, kwargs)
        if verbose:
            seconds = time.perf_counter() - started
            print(f"{kwargs} ran={row.ran - ran} checked={row.checked - checked} {seconds:.1f} s")
    print(f"{adapter.name}: {row.ran} of {row.total} ran, {row.checked} pass check_env", flush=True)
    return row


def table(rows: list[Row]) -> str:
    lines = [
        f"| adapter | package | ids | ran {EPISODES} episodes | pass `check_env` | episodes/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        package = f"{row.adapter.package} {row.version}"
        speed = f"{row.episodes / row.seconds:.3g}" if row.seconds else "–"  # noqa: RUF001
        counts = f"{row.total} | {row.ran} | {row.checked}"
        lines.append(f"| {row.adapter.name} | {package} | {counts} | {speed} |")
    foreign = [row for row in rows if row.adapter.package not in ("gymnasium", "gspo-env")]
    total = sum(row.ran for row in foreign)
    repeated = sum(row.ran for row in foreign if "reasoning-gym tasks" in row.adapter.name)
    if total > 100:
        lines += [
            "",
            f"**{total} environments of other packages ran {EPISODES} episodes each without an "
            f"exception**; {total - repeated} without those of GEM that wrap a task of "
            "reasoning-gym. `check_env` runs only where the episodes did.",
        ]
    if any(row.faults for row in rows):
        lines += ["", "| adapter | what failed | environments |", "|---|---|---|"]
    for row in rows:
        for why, names in row.faults.items():
            shown = ", ".join(f"`{name}`" for name in names)
            lines.append(f"| {row.adapter.name} | {why} | {len(names)}: {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="The table of the adapters.")
    parser.add_argument("--only", nargs="+", default=[""], help="starts of adapters' names")
    parser.add_argument("--verbose", action="store_true", help="a line for each environment")
    parser.add_argument("--write", type=Path, help="file with the two marks")
    arguments = parser.parse_args()
    chosen = [a for a in ADAPTERS if a.name.startswith(tuple(arguments.only))]
    rows = [row for a in chosen if (row := measure(a, arguments.verbose)) is not None]
    text = table(rows)
    print(text)
    if arguments.write:
        table_name = f"table {' '.join(arguments.only)}".strip()
        begin, end = (f"<!-- {table_name}: {mark} -->" for mark in ("begin", "end"))
        before, _, rest = arguments.write.read_text().partition(begin)
        after = rest.partition(end)[2]
        arguments.write.write_text(f"{before}{begin}\n{text}\n{end}{after}")


if __name__ == "__main__":
    main()
