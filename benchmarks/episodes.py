"""What keeping episodes costs a training run, and how fast their page is.

    python benchmarks/episodes.py cost          share of the process CPU time of the default run
    python benchmarks/episodes.py page          a page of 10,000 episodes in a real Chromium

`cost` trains with the default settings (some minutes) and measures the process CPU time inside the
log of episodes and the page. `page` needs `pip install 'gspo-env[browser]'` and a Chromium. It
prints the time from the start of the navigation until the page is drawn, and the time from an input
to the next frame for several filters.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

OPEN_LIMIT, FILTER_LIMIT = 2000, 100
"""Milliseconds that are allowed."""


def cost(steps: int) -> None:
    """Prints the share of the CPU time that is spent on kept episodes."""
    import gspo_agents.reporter as reporter
    import gspo_env.learner.learner as learner
    from gspo_agents.gspo import GSPOAgent
    from gspo_env.config import Config
    from gspo_env.report.episodes import episode_files
    from gspo_env.report.episodes_log import EpisodeLog

    spent = {"log": 0.0, "page": 0.0, "tokens": 0.0}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            before = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                spent[name] += time.process_time() - before

        return call

    EpisodeLog._write = timed("log", EpisodeLog._write)  # type: ignore[method-assign]
    reporter.write_page = timed("page", reporter.write_page)
    learner.token_values = timed("tokens", learner.token_values)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        changes = {"steps": steps} if steps else {}
        began = time.process_time()
        config = Config.from_recipe(tracker="none", output=str(run), **changes)
        GSPOAgent(config=config).train()
        total = time.process_time() - began
        size = sum(file.size for file in episode_files(run))
        page = (run / "view.html").stat().st_size
        print(
            f"training {total:.1f} s of CPU time; "
            f"files {size / 1e6:.1f} MB, page {page / 1e6:.1f} MB"
        )
    for name, seconds in spent.items():
        print(f"{name:<7} {seconds:.2f} s, {seconds / total:.2%}")
    print(f"all     {sum(spent.values()):.2f} s, {sum(spent.values()) / total:.2%} (less than 1 %)")


def write_run(folder: Path, episodes: int, turns: int) -> None:
    """Writes a run of random episodes."""
    import pyarrow.parquet as pq

    from gspo_env.learner.tokens import TokenValues
    from gspo_env.report.episodes_log import to_table
    from gspo_env.types import Episode, Group, StepInfo, StopReason, Task, Turn

    rng = np.random.default_rng(0)
    (folder / "episodes").mkdir(parents=True)
    stops = (StopReason.TERMINATED, StopReason.TRUNCATED, StopReason.MAX_TURNS)

    def episode(seed: int) -> Episode:
        return Episode(
            task=Task(env_id="gspo/Lookup-v0", seed=seed),
            turns=tuple(
                Turn(
                    prompt_ids=tuple(rng.integers(0, 400, 40).tolist()),
                    action_ids=tuple(rng.integers(0, 400, 15).tolist()),
                    logprobs=tuple((-rng.exponential(size=15)).tolist()),
                    text='<tool_call>{"name": "lookup", "arguments": {"key": "amber"}}</tool_call>',
                    observation=f"the word is {rng.integers(0, 400)}",
                    reward=float(rng.standard_normal()),
                    info=StepInfo(observation_role="tool"),
                )
                for _ in range(rng.integers(1, 2 * turns))
            ),
            outcome=float(rng.random()),
            stop_reason=stops[rng.integers(0, 3)],
            terminated=True,
            truncated=False,
            success=bool(rng.random() < 0.5),
        )

    for step in range(100):
        played = [[episode(10_000 * step + p)] * 1 for p in range(episodes // 100)]
        groups = {p: Group(task=row[0].task, episodes=tuple(row)) for p, row in enumerate(played)}
        values = {
            (p, 0, k): TokenValues(**dict.fromkeys(_VALUES, rng.standard_normal(15)))
            for p, (one,) in enumerate(played)
            for k in range(len(one.turns))
        }
        path = folder / "episodes" / f"{step:06d}-train.parquet"
        pq.write_table(to_table(step, "train", groups, values), path, compression="zstd")
        with (folder / "metrics.jsonl").open("a") as file:
            names = ", ".join(f'"rollout/m{n}": {rng.random()}' for n in range(60))
            file.write(f'{{"step": {step}, "time": 0, "metrics": {{{names}}}}}\n')


_VALUES = ("advantage", "trainer_logprobs", "ratio", "clipped", "entropy")


def page(episodes: int, turns: int, rounds: int) -> None:
    """Prints how fast a page opens and filters."""
    from playwright.sync_api import sync_playwright

    from gspo_env.report.episodes_page import write_page

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = Path(folder, "run")
        write_run(run, episodes, turns)
        before = time.process_time()
        written = write_page(run, run / "view.html")
        seconds = time.process_time() - before
        print(f"{written.stat().st_size / 1e6:.1f} MB, written in {seconds:.1f} s of CPU time")
        system = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=system, args=["--no-sandbox"])
        opened: list[float] = []
        filtered: list[float] = []
        for _ in range(rounds):
            tab = browser.new_page()
            tab.goto(f"{written.as_uri()}#episodes")
            tab.wait_for_selector("html[data-ready]", timeout=60_000)
            opened.append(float(tab.get_attribute("html", "data-ready") or 0))
            filtered += [tab.evaluate(_FILTER, [name, value]) for name, value in _INPUTS]
            tab.close()
        browser.close()
    for name, values, limit in (("open", opened, OPEN_LIMIT), ("filter", filtered, FILTER_LIMIT)):
        middle, most = statistics.median(values), max(values)
        print(f"{name:<7} median {middle:.0f} ms, most {most:.0f} ms (less than {limit} ms)")


_INPUTS = (
    ("label:nth-of-type(2) select", "true"),
    ("label:nth-of-type(3) select", "terminated"),
    ("#search", "99"),
    ("#search", ""),
    ("label:nth-of-type(2) select", ""),
)
_FILTER = """async ([name, value]) => {
  const field = document.querySelector(`.filters ${name}`);
  const began = performance.now();
  field.value = value;
  field.dispatchEvent(new Event(field.matches("select") ? "change" : "input", { bubbles: true }));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - began;
}"""


def main() -> None:
    """Runs one of the two measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("cost", "page"))
    parser.add_argument("--steps", type=int, default=0, help="0: those of the default run")
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=4, help="mean number of turns")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.what == "cost":
        cost(given.steps)
    else:
        page(given.episodes, given.turns, given.rounds)


if __name__ == "__main__":
    main()
