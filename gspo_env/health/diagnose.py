"""Why does a run not learn? Applies the rules to its record.

Example:
    for finding in diagnose(Run.open("runs/Lookup-v0-seed0-1")).findings:
        print(finding.text, finding.advice)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gspo_env.health.findings import Finding, show
from gspo_env.health.rules import quote, share
from gspo_env.health.run_rules import RULES
from gspo_env.runs.evaluations import may_be_chance
from gspo_env.runs.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What all rules found in a run."""

    run: Run
    findings: tuple[Finding, ...]
    """Causes first, without their consequences."""
    consequences: tuple[str, ...]
    """Rules that found something that an earlier finding explains."""
    notes: tuple[str, ...]
    """Observations, not problems."""
    not_judged: tuple[str, ...]
    """Rules whose metrics the run lacks."""


def diagnose(run: Run) -> Diagnosis:
    """Applies all rules to a run."""
    findings: list[Finding] = []
    consequences: list[str] = []
    explained: set[str] = set()
    for rule in RULES:
        finding = rule.find(run, rule.limit)
        if finding is None:
            continue
        if rule.name in explained:
            consequences.append(rule.name)
        else:
            findings.append(finding)
        explained |= {*rule.explains, "no_progress"}
    return Diagnosis(
        run=run,
        findings=tuple(findings),
        consequences=tuple(consequences),
        notes=tuple(_notes(run)),
        not_judged=tuple(rule.name for rule in RULES if not rule.judges(run)),
    )


def lines(diagnosis: Diagnosis) -> list[str]:
    """Returns what a terminal shows."""
    run = diagnosis.run
    shown = [f"{run.name}: {run.state}{_success(run)}"]
    for finding in diagnosis.findings:
        shown += ["", show(finding)]
    if not diagnosis.findings:
        judged = len(RULES) - len(diagnosis.not_judged)
        but = ", but the run warned while it trained" if run.warnings else ""
        shown += ["", f"Nothing wrong was found by {judged} rules{but}."]
    if diagnosis.consequences:
        shown += ["", f"Consequences of these: {', '.join(diagnosis.consequences)}."]
    if diagnosis.notes:
        shown += ["", *(f"Note: {note}" for note in diagnosis.notes)]
    if diagnosis.not_judged:
        names = ", ".join(diagnosis.not_judged)
        shown += ["", f"Not judged, because metrics are missing: {names}."]
    return shown


def _success(run: Run) -> str:
    if not run.evaluations:
        return ""
    first, *others = run.evaluations
    shown = [f"{share(e.success)} after step {e.step}" for e in (first, *others[-1:])]
    return f"; success {', '.join(shown)}"


def _notes(run: Run) -> Iterator[str]:
    if not len(run.steps):
        yield "The run has logged no training step, so most rules have nothing to judge."
    if not run.settings:
        yield "The folder has no readable config.toml, so the settings are unknown."
    if len(run.evaluations) > 1 and (run.folder / "checkpoints" / "best").is_dir():
        best = max(run.evaluations[1:], key=lambda e: e.success)
        if not may_be_chance(best, run.evaluations[-1], len(run.evaluations)):
            yield (
                f"The best evaluation was after step {best.step} ({share(best.success)}); its "
                "model is in checkpoints/best."
            )
    if dropped := run.total("tracking/non_finite"):
        yield f"{dropped:.0f} values of metrics were not finite and are not recorded."
    if failed := run.highest("train/failed_saves"):
        yield f"{failed:.0f} files or checkpoints could not be written."
    for text in dict(line.partition(": ")[::2] for line in run.warnings).values():
        yield f"The run warned: {quote(text)}"
