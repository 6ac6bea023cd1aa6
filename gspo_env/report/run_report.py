"""The report of one or several runs: pictures, a page, and Markdown for a paper's appendix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np

import gspo_env
from gspo_env.episodes.schema import EpisodeRecord, episode_files, read_episodes
from gspo_env.episodes.text import render_record
from gspo_env.errors import OutputError
from gspo_env.files import write_file
from gspo_env.health.diagnose import diagnose
from gspo_env.health.record import RunRecord
from gspo_env.health.rules import share
from gspo_env.redaction import redact_text, write_text
from gspo_env.report import plots
from gspo_env.report.arms import RunArm, arms_of, band
from gspo_env.report.page import Section, html_page, markdown_page

HTML, MARKDOWN = "report.html", "report.md"
_MAX_FILES = 8
"""Steps whose training episodes are drawn for each run, spread over the run."""
_METHOD = (
    "Of several runs with the same settings, the curve is the interquartile mean over their seeds, "
    "at the steps that all of them have; the band is a 95 % bootstrap interval, of fewer than 6 "
    "runs their range; thin lines are the runs. Of one run, the curve is that run, and the band of "
    "an evaluation is a 95 % interval over the choice of its tasks (Wilson's; of returns, 1.96 "
    "standard errors), not over other seeds."
)


def write_run_report(
    runs: Sequence[RunRecord], folder: Path, *, with_markdown: bool = False, made_by: str = ""
) -> list[Path]:
    """Writes the page, the pictures and, if asked, the Markdown; returns their paths.

    Args:
        runs: The runs.
        folder: Where the files go.
        with_markdown: Whether to write Markdown too.
        made_by: The command that made the report.

    Raises:
        OutputError: There is no run, or a file cannot be written.
    """
    if not runs:
        raise OutputError("a report has no runs; expected at least one folder of a run")
    arms = arms_of(runs)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pictures = list(_pictures(arms, folder))
        sections = [*_tables(arms), *pictures, *_diagnosis(runs), *_examples(arms)]
        sections += _origin(runs, made_by)
        write_text(folder / HTML, html_page(title, sections))
        if with_markdown:
            write_text(folder / MARKDOWN, markdown_page(title, sections))
    except OSError as error:
        raise OutputError(
            f"cannot write to {str(folder)!r}: {error.strerror}; expected a folder that can be "
            "written, named with --out"
        ) from error
    paths = [folder / HTML, *(section.picture for section in pictures if section.picture)]
    return [*paths, folder / MARKDOWN] if with_markdown else paths


def _tables(arms: Sequence[RunArm]) -> Iterator[Section]:
    """Yields a line for each arm, if one has several runs, and a line for each run."""
    if any(len(arm.runs) > 1 for arm in arms):
        table = [["arm", "runs", "step", "success (band)", "return (band)"]]
        for arm in arms:
            bands = [band(arm, metric) for metric in ("eval/success", "eval/return")]
            step = "-" if bands[0] is None else str(bands[0].steps[-1])
            cells = [
                "-" if b is None else f"{b.middle[-1]:.3f} ({b.low[-1]:.3f} to {b.high[-1]:.3f})"
                for b in bands
            ]
            table.append([arm.name, str(len(arm.runs)), step, *cells])
        yield Section(table=table)
    head = ["run", "seed", "steps", "success before", "after", "best", "return after"]
    head += ["turns", "tokens an episode", "minutes of training"]
    yield Section(table=[head, *(_row(run) for arm in arms for run in arm.runs)], text=_METHOD)


def _row(run: RunRecord) -> list[str]:
    evaluations = ["-"] * 4
    if run.evaluations:
        first, last = run.evaluations[0], run.evaluations[-1]
        best = max(evaluation.success for evaluation in run.evaluations)
        evaluations = [share(first.success), share(last.success), share(best)]
        evaluations.append(f"{last.mean_return:.3g}")
    tokens, turns = run.late("rollout/tokens"), run.late("rollout/turns")
    seconds = sum(run.total(f"time/{part}") for part in ("rollout", "update", "sync", "eval"))
    return [
        run.name,
        run.text("seed") or "?",
        run.progress,
        *evaluations,
        "-" if turns is None else f"{turns:.2f}",
        "-" if tokens is None else f"{tokens / run.episodes_per_step:.1f}",
        f"{seconds / 60:.1f}",
    ]


def _pictures(arms: Sequence[RunArm], folder: Path) -> Iterator[Section]:
    episodes = [[e for run in arm.runs for e in _training_episodes(run)] for arm in arms]
    for name, title, caption, figure in (
        (
            "curves.png",
            "Learning",
            "Success and return over training steps.",
            plots.learning_figure(arms),
        ),
        (
            "episodes.png",
            "Episodes",
            "Why training episodes end, their turns, and their sampled tokens.",
            plots.episodes_figure(arms),
        ),
        (
            "credit.png",
            "Credit by turn",
            "Advantage by the index of the turn, in the kept training episodes.",
            plots.credit_figure(arms, episodes),
        ),
        ("update.png", "Update", "What the updates measured.", plots.update_figure(arms)),
    ):
        write_file(folder, name, partial(figure.savefig, format="png"))
        yield Section(title=title, picture=folder / name, caption=caption)


def _training_episodes(run: RunRecord) -> list[EpisodeRecord]:
    steps = [file.step for file in episode_files(run.folder) if file.phase == "train"]
    if not steps:
        return []
    spread = {steps[round(n)] for n in np.linspace(0, len(steps) - 1, _MAX_FILES)}
    return list(read_episodes(run.folder, phases=["train"], steps=spread))


def _diagnosis(runs: Sequence[RunRecord]) -> Iterator[Section]:
    sound = []
    for run in runs:
        diagnosis = diagnose(run)
        findings = [f"{f.text} Try: {f.advice}" for f in diagnosis.findings]
        notes = [f"Note: {note}" for note in diagnosis.notes]
        if findings or notes:
            yield Section(title=f"Diagnosis of {run.name}", items=[*findings, *notes])
        if not findings:
            sound.append(run.name)
    if sound:
        yield Section(text=f"Nothing wrong was found in {', '.join(sound)}.")


def _examples(arms: Sequence[RunArm]) -> Iterator[Section]:
    """Yields the best and the worst episode of the last evaluations of each arm."""
    blocks = {}
    for arm in arms:
        rows: list[tuple[RunRecord, EpisodeRecord]] = []
        for run in arm.runs:
            files = episode_files(run.folder)
            last = ([f for f in files if f.phase == "eval"] or list(files))[-1:]
            for file in last:
                read = read_episodes(run.folder, phases=[file.phase], steps=[file.step])
                rows += [(run, episode) for episode in read if episode.error is None]
        rows.sort(key=lambda row: (bool(row[1].success), row[1].total_reward, row[1].outcome))
        where = f" of {arm.name}" if len(arms) > 1 else ""
        for word, (run, episode) in zip(("Best", "Worst"), (rows[-1:] + rows[:1]), strict=False):
            title = f"{word} episode{where}: {run.name}, step {episode.step}, seed {episode.seed}"
            blocks[title] = render_record(episode)
    if blocks:
        yield Section(title="Episodes to read", blocks=blocks)


def _origin(runs: Sequence[RunRecord], made_by: str) -> list[Section]:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    text = f"gspo_env {gspo_env.__version__}, {now}"
    text += f", by {redact_text(made_by)}" if made_by else ""
    text += ". Save the settings of a run as config.toml to train with them again: "
    text += "gspo-env train --config config.toml --output NEW"
    settings = {f"Settings of {run.name}": run.config for run in runs if run.config}
    return [Section(title="How it was made", text=text, blocks=settings)]
