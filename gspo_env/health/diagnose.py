"""Why does a run not learn? Rules over its metrics and episodes, and what they found.

Example:
    for finding in diagnose(read_run("runs/Lookup-v0-seed0-1")).findings:
        print(finding.text, finding.advice)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gspo_env.episodes.schema import EpisodeFile, EpisodeRecord, episode_files, read_episodes
from gspo_env.errors import OutputError
from gspo_env.health.collapse import may_be_chance
from gspo_env.health.diagnose_table import RULES
from gspo_env.health.rules import Evidence, quote, share
from gspo_env.report.run_record import RunRecord

_MOST_FILES = 8
"""Steps whose training episodes are read, at the beginning and at the end."""
_SHORT = 10
"""Steps from which the rule `no_progress` judges."""
_MOST = 16 * 10**6
"""Bytes of their files, for runs that keep all episodes of large batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a rule found."""

    name: str
    """Name of the rule."""
    text: str
    """What is wrong, with figures."""
    advice: str
    """The settings to try."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What all rules found in a run."""

    run: RunRecord
    findings: tuple[Finding, ...]
    """Causes first, without their consequences."""
    explained: tuple[str, ...]
    """Rules that found something that an earlier finding explains."""
    notes: tuple[str, ...]
    """Facts that are no fault."""
    not_judged: tuple[str, ...]
    """Rules whose metrics or episodes the run lacks."""


def diagnose(run: RunRecord) -> Diagnosis:
    """Applies all rules to a run."""
    beginning, end = _kept(run)
    evidence = Evidence(run=run, episodes=end, first_episodes=beginning)
    findings: list[Finding] = []
    explained: list[str] = []
    known: set[str] = set()
    missing = []
    for rule in RULES:
        if any(name not in run.series for name in rule.needs) or (rule.episodes and not end):
            missing.append(rule.name)
            continue
        said = rule.check(evidence, rule.limit)
        if said is None:
            continue
        if rule.name in known:
            explained.append(rule.name)
        else:
            findings.append(Finding(name=rule.name, text=said[0], advice=said[1]))
        known |= set(rule.explains)
    return Diagnosis(
        run=run,
        findings=tuple(findings),
        explained=tuple(explained),
        notes=tuple(_notes(run)),
        not_judged=tuple(missing),
    )


def _kept(run: RunRecord) -> tuple[Sequence[EpisodeRecord], Sequence[EpisodeRecord]]:
    """Reads training episodes of the first and of the last steps; empty if none are kept."""
    files = [file for file in episode_files(run.folder) if file.phase == "train"]
    count = min(_MOST_FILES, run.window)
    late = _steps(files[: -count - 1 : -1])
    early = [step for step in _steps(files[:count]) if step not in late]
    try:
        found = list(read_episodes(run.folder, phases=["train"], steps={*early, *late}))
    except OutputError:  # none are kept
        return (), ()
    return [e for e in found if e.step in early], [e for e in found if e.step in late]


def _steps(files: Sequence[EpisodeFile]) -> list[int]:
    """Returns the steps of the first files, as many as have few bytes; at least one."""
    sizes = accumulate(file.size for file in files)
    return [f.step for n, (f, s) in enumerate(zip(files, sizes, strict=True)) if not n or s < _MOST]


def _notes(run: RunRecord) -> list[str]:
    notes = []
    if not len(run.steps):
        notes.append("The run has logged no training step, so most rules have nothing to judge.")
    elif len(run.steps) < _SHORT:
        notes.append(f"Fewer than {_SHORT} steps are too few to say that nothing improves.")
    if not run.settings:
        notes.append("The folder has no readable config.toml, so settings are not known.")
    best, levels = run.folder / "checkpoints" / "best", run.evaluations
    if len(levels) > 1:
        top = max(levels[1:], key=lambda level: level.success)
        if best.is_dir() and not may_be_chance(top, levels[-1], len(levels)):
            notes.append(
                f"The best evaluation was after step {top.step} ({share(top.success)}); its model "
                "is in checkpoints/best."
            )
    if dropped := run.total("tracking/non_finite"):
        notes.append(f"{dropped:.0f} values of metrics were not finite and are not recorded.")
    saves = run.series.get("train/failed_saves")
    if saves is not None and (failed := saves.values.max()):
        notes.append(f"{failed:.0f} files or checkpoints could not be written.")
    said = dict(line.partition(": ")[::2] for line in run.warnings if ": " in line)
    notes += [f"The run warned: {quote(text)}" for text in said.values()]
    return notes


def lines(found: Diagnosis) -> list[str]:
    """Returns what a terminal shows."""
    run = found.run
    shown = [f"{run.name}: {run.state}" + _success(run)]
    for number, finding in enumerate(found.findings, start=1):
        shown += ["", f"{number}. {finding.text} [{finding.name}]", f"   Try: {finding.advice}"]
    judged = len(RULES) - len(found.not_judged)
    if not found.findings:
        shown += ["", f"Nothing wrong was found by {judged} rules."]
    if found.explained:
        shown += ["", f"Consequences of these: {', '.join(found.explained)}."]
    if found.notes:
        shown += ["", *(f"Note: {note}" for note in found.notes)]
    if found.not_judged:
        shown += [
            "",
            f"Not judged, for lack of metrics or episodes: {', '.join(found.not_judged)}.",
        ]
    return shown


def _success(run: RunRecord) -> str:
    levels = run.evaluations
    if not levels:
        return ""
    shown = [levels[0], *levels[1:][-1:]]
    return "; success " + ", ".join(f"{share(e.success)} after step {e.step}" for e in shown)
