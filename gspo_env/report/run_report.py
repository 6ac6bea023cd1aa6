"""The report of one or several runs: pictures, a page, and Markdown for a paper's appendix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import gspo_env
from gspo_env.episodes import page_html
from gspo_env.episodes.schema import EpisodeRecord, episode_files, read_episodes
from gspo_env.episodes.text import render_record
from gspo_env.errors import OutputError
from gspo_env.files import write_file
from gspo_env.health.diagnose import Diagnosis, diagnose
from gspo_env.health.record import RunRecord
from gspo_env.health.rules import share
from gspo_env.redaction import redact_text, visible, write_text
from gspo_env.report.arms import RunArm, arms_of, band, command
from gspo_env.report.plots import (
    credit_figure,
    episodes_figure,
    learning_figure,
    update_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HTML, MARKDOWN = "report.html", "report.md"
_MOST_FILES = 8
"""Steps whose training episodes are drawn for each run, spread over the run."""
_METHOD = (
    "A band is a 95 % interval. Of several runs with the same settings, the curve is the "
    "interquartile mean over their seeds, with a bootstrap interval, at the steps that all of them "
    "have; thin lines are the runs. Of one run, the curve is that run, and the band of an "
    "evaluation covers the choice of its tasks (Wilson's interval; of returns, 1.96 standard "
    "errors), not other seeds."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture of a report."""

    name: str
    """Of the file."""
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a report shows."""

    arms: tuple[RunArm, ...]
    diagnoses: tuple[Diagnosis, ...]
    """One a run, in the order of the arms."""
    pictures: tuple[Picture, ...]
    examples: tuple[tuple[str, EpisodeRecord], ...]
    """Titles and episodes: the best and the worst of each arm."""

    @property
    def runs(self) -> list[RunRecord]:
        """The runs, arm by arm."""
        return [run for arm in self.arms for run in arm.runs]

    @property
    def sound(self) -> str:
        """Names the runs in which nothing wrong was found; empty if there is none."""
        names = [found.run.name for found in self.diagnoses if not found.findings]
        return f"Nothing wrong was found in {', '.join(names)}." if names else ""

    @property
    def title(self) -> str:
        """The title of the page."""
        runs = self.runs
        return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def make_report(runs: Sequence[RunRecord]) -> Report:
    """Reads what a report of runs shows.

    Raises:
        OutputError: There is no run.
    """
    if not runs:
        raise OutputError("a report has no runs; expected at least one folder of a run")
    arms = tuple(arms_of(runs))
    kept = [[e for run in arm.runs for e in _training(run)] for arm in arms]
    pictures = (
        Picture(
            name="curves.png",
            title="Learning",
            caption="Success and return of the evaluations over training steps.",
            figure=learning_figure(arms),
        ),
        Picture(
            name="episodes.png",
            title="Episodes",
            caption="Why training episodes end, their turns, and their sampled tokens.",
            figure=episodes_figure(arms),
        ),
        Picture(
            name="credit.png",
            title="Credit by turn",
            caption="Advantage by the index of the turn, in the kept training episodes.",
            figure=credit_figure(arms, kept),
        ),
        Picture(
            name="update.png",
            title="Update",
            caption="What the updates measured.",
            figure=update_figure(arms),
        ),
    )
    return Report(
        arms=arms,
        diagnoses=tuple(diagnose(run) for arm in arms for run in arm.runs),
        pictures=pictures,
        examples=tuple(pair for arm in arms for pair in _examples(arm, len(arms) > 1)),
    )


def _training(run: RunRecord) -> Sequence[EpisodeRecord]:
    steps = [file.step for file in episode_files(run.folder) if file.phase == "train"]
    if not steps:
        return ()
    spread = {steps[round(n)] for n in np.linspace(0, len(steps) - 1, _MOST_FILES)}
    return list(read_episodes(run.folder, phases=["train"], steps=spread))


def _examples(arm: RunArm, several: bool) -> Iterator[tuple[str, EpisodeRecord]]:
    """Yields the best and the worst episode of the last evaluations of an arm."""
    found: list[tuple[RunRecord, EpisodeRecord]] = []
    for run in arm.runs:
        files = episode_files(run.folder)
        last = [f for f in files if f.phase == "eval"] or [f for f in files if f.phase == "train"]
        if last:
            read = read_episodes(run.folder, phases=[last[-1].phase], steps=[last[-1].step])
            found += [(run, episode) for episode in read if episode.error is None]
    if not found:
        return
    found.sort(key=lambda pair: (bool(pair[1].success), pair[1].total_reward, pair[1].outcome))
    where = f" of {arm.name}" if several else ""
    for word, (run, e) in (("Best", found[-1]), ("Worst", found[0])):
        kind = "evaluation after" if e.phase == "eval" else "training of"
        yield f"{word} episode{where}: {run.name}, {kind} step {e.step}, seed {e.seed}", e


def overview(report: Report) -> list[list[str]]:
    """Returns a header and a line for each run."""
    head = ["run", "seed", "steps", "success before", "after", "best", "return after"]
    head += ["turns", "tokens an episode", "minutes", "diagnosis"]
    lines = [head]
    for run, found in zip(report.runs, report.diagnoses, strict=True):
        levels = run.evaluations
        tokens, turns = run.late("rollout/tokens"), run.late("rollout/turns")
        seconds = sum(run.total(f"time/{part}") for part in ("rollout", "update", "sync", "eval"))
        best = max((level.success for level in levels), default=None)
        lines.append(
            [
                run.name,
                run.text("seed") or "?",
                run.progress,
                *(share(level.success) for level in levels[:1]),
                *(share(level.success) for level in levels[-1:]),
                *([] if best is None else [share(best)]),
                *(f"{level.mean_return:.3g}" for level in levels[-1:]),
                *([] if levels else ["-"] * 4),
                "-" if turns is None else f"{turns:.2f}",
                "-" if tokens is None else f"{tokens / run.episodes_per_step:.1f}",
                f"{seconds / 60:.1f}",
                ", ".join(finding.name for finding in found.findings) or "nothing found",
            ]
        )
    return lines


def comparison(report: Report) -> list[list[str]]:
    """Returns a header and a line for each arm; empty unless an arm has several runs."""
    if all(len(arm.runs) == 1 for arm in report.arms):
        return []
    lines = [["arm", "runs", "step", "success (95 %)", "return (95 %)"]]
    for arm in report.arms:
        cells = [arm.name, str(len(arm.runs))]
        bands = [band(arm, metric) for metric in ("eval/success", "eval/return")]
        cells.append("-" if bands[0] is None else str(bands[0].steps[-1]))
        for found in bands:
            cells.append(
                "-"
                if found is None
                else f"{found.middle[-1]:.3f} ({found.low[-1]:.3f} to {found.high[-1]:.3f})"
            )
        lines.append(cells)
    return lines


def html_page(report: Report, folder: Path, made_by: str) -> str:
    """Returns the page; the pictures are read from the folder."""
    body = [f"<h1>{page_html.escape(report.title)}</h1>"]
    if table := comparison(report):
        body.append(page_html.table(table))
    body += [page_html.table(overview(report)), f"<p>{page_html.escape(_METHOD)}</p>"]
    for picture in report.pictures:
        body.append(f"<h2>{picture.title}</h2><p>{picture.caption}</p>")
        body.append(page_html.picture(folder / picture.name, picture.caption))
    body.append("<h2>Diagnosis</h2>")
    for found in report.diagnoses:
        tried = (
            f"{page_html.escape(f.text)}<br><em>Try:</em> {page_html.escape(f.advice)}"
            for f in found.findings
        )
        items = "".join(f"<li>{item}</li>" for item in tried)
        notes = "".join(f"<li>{page_html.escape(note)}</li>" for note in found.notes)
        if items or notes:
            body.append(f"<h3>{page_html.escape(found.run.name)}</h3><ol>{items}</ol>")
            body.append(f"<p>Notes</p><ul>{notes}</ul>" if notes else "")
    body.append(f"<p>{page_html.escape(report.sound)}</p>" if report.sound else "")
    body.append("<h2>Episodes to read</h2>" if report.examples else "")
    body += [page_html.folded(title, render_record(e)) for title, e in report.examples]
    body.append(f"<h2>How it was made</h2><p>{page_html.escape(made_by)}</p>")
    for run in report.runs:
        body.append(page_html.folded(f"Command of {run.name}", redact_text(command(run))))
        body.append(page_html.folded(f"Settings of {run.name}", run.config))
    return page_html.page(report.title, body)


def markdown(report: Report, made_by: str) -> str:
    """Returns the report as Markdown: tables, links to the pictures, commands and settings."""
    parts = [f"# {cell(report.title)}", ""]
    for table in (comparison(report), overview(report)):
        if table:
            head, *lines = table
            parts += [_line(head), _line(["---"] * len(head), raw=True), *map(_line, lines), ""]
    parts += [_METHOD, ""]
    for picture in report.pictures:
        parts += [f"## {picture.title}", "", f"![{picture.caption}]({picture.name})", ""]
        parts += [picture.caption, ""]
    parts += ["## Diagnosis", ""]
    for found in report.diagnoses:
        said = [f"- {cell(f.text)} Try: {cell(f.advice)}" for f in found.findings]
        parts += [f"### {cell(found.run.name)}", "", *said, ""] if said else []
    parts += [cell(report.sound), ""] if report.sound else []
    if report.examples:
        parts += ["## Episodes to read", ""]
        for title, episode in report.examples:
            parts += [f"### {cell(title)}", "", fenced(render_record(episode)), ""]
    parts += ["## How it was made", "", cell(made_by), ""]
    for run in report.runs:
        parts += [f"### {cell(run.name)}", "", fenced(redact_text(command(run)), "bash"), ""]
        parts += [fenced(run.config, "toml"), ""] if run.config else []
    return "\n".join(parts)


_ACTIVE = re.compile(r"[\\`*\[\]|~$#!^{}]|(?<!\w)_|_(?!\w)")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "://": ":&#47;/"}


def cell(text: str) -> str:
    """Escapes a text for a line or a cell of Markdown; it has no links, markup or formulas."""
    line = " ".join(visible(text).split())
    line = _ACTIVE.sub(lambda found: f"\\{found[0]}", line)
    for plain, entity in _ENTITIES.items():
        line = line.replace(plain, entity)
    # a list or a heading at the beginning of a line
    return re.sub(r"^(\d*)([-+=.)])(?=[-+=\s]|$)", r"\1\\\2", line)


def fenced(text: str, language: str = "text") -> str:
    """Returns a block of code that no text can end."""
    shown = visible(text).rstrip("\n")
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{shown}\n{fence}"


def _line(cells: Sequence[str], *, raw: bool = False) -> str:
    return "| " + " | ".join(each if raw else cell(each) for each in cells) + " |"


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
    report = make_report(runs)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    made = f"gspo_env {gspo_env.__version__}, {now}"
    made += f", by {redact_text(made_by)}" if made_by else ""
    paths = [folder / HTML]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in report.pictures:
            write_file(folder, picture.name, partial(picture.figure.savefig, format="png"))
            paths.append(folder / picture.name)
        write_text(paths[0], html_page(report, folder, made))
        if with_markdown:
            paths.append(folder / MARKDOWN)
            write_text(paths[-1], markdown(report, made))
    except OSError as error:
        raise OutputError(
            f"cannot write to {str(folder)!r}: {error.strerror}; expected a folder that can be "
            "written, named with --out"
        ) from error
    return paths
