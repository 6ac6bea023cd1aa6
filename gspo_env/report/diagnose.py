"""Why does a run not learn? Rules over its metrics and episodes, and what they found.

Example:
    for finding in diagnose(read_run("runs/Lookup-v0-seed0-1")).findings:
        print(finding.text, finding.advice)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gspo_env.errors import OutputError
from gspo_env.report import diagnose_rules as first
from gspo_env.report import diagnose_signal as signal
from gspo_env.report.diagnose_rules import Evidence, Said, quote, share
from gspo_env.report.episodes import EpisodeFile, EpisodeRecord, episode_files, read_episodes
from gspo_env.report.runs import RunRecord
from gspo_env.training.collapse import may_be_chance
from gspo_env.training.probe import HALF_TOLERANCE, TOLERANCE
from gspo_env.training.watch import _NEARLY_ALL

_MOST_FILES = 8
"""Steps whose training episodes are read, at the beginning and at the end."""
_MOST = 16 * 10**6
"""Bytes of their files, for runs that keep all episodes of large batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One thing that may be wrong with a run."""

    name: str
    check: Callable[[Evidence, float], Said | None]
    limit: float
    """The threshold that `check` gets."""
    reason: str
    """Why it has this value."""
    needs: tuple[str, ...] = ()
    """Metrics without which the rule cannot say anything."""
    episodes: bool = False
    """Whether it needs kept training episodes."""
    explains: tuple[str, ...] = ()
    """Rules whose findings are consequences of this one."""


_SIGNAL = ("no_variance", "entropy", "few_turns", "no_progress")
_OUTCOME = ("hardly_moves", *_SIGNAL)
_SHAPE = ("malformed", "lengths", "cut_actions", "context", "turn_limit", "hacking", "too_hard")

RULES = (
    Rule(
        name="failed",
        check=first.failed,
        limit=0,
        reason="an error is always said",
    ),
    Rule(
        name="environment",
        check=first.environment,
        limit=0.05,
        reason="of 8 episodes of a group, one is lost in every third group; below that, groups "
        "stay whole",
        needs=("rollout/lost_episodes",),
        explains=("no_progress",),
    ),
    Rule(
        name="no_turns",
        check=first.no_turns,
        limit=0.1,
        reason="nine in ten episodes have nothing to train on",
        needs=("rollout/turns",),
        explains=(*_SHAPE, *_OUTCOME),
    ),
    Rule(
        name="non_finite",
        check=first.non_finite,
        limit=0.01,
        reason="none is skipped in a run whose numbers are sound; float16 skips some while it "
        "finds its loss scale, so there only the last steps count",
        needs=("train/skipped_steps",),
        explains=("no_progress", "hardly_moves"),
    ),
    Rule(
        name="engine",
        check=first.engine,
        limit=1.0,
        reason=f"times the bound of the check after each update: {TOLERANCE['float32']:g} nats in "
        f"float32, {HALF_TOLERANCE:g} in half precision",
        needs=("train/logprob_diff_mean",),
        explains=("clipped", "collapse", *_SHAPE, *_OUTCOME),
    ),
    Rule(
        name="collapse",
        check=first.collapse,
        limit=3.5,
        reason="standard errors of a rise of the return that is no chance; with one, the rule "
        "`hacking` applies. What counts as a fall is what the warning of a run says",
        needs=("rollout/success",),
        explains=("clipped", *_SHAPE, *_OUTCOME),
    ),
    Rule(
        name="malformed",
        check=first.malformed,
        limit=0.1,
        reason="malformed calls of a turn: a tenth of the turns does nothing; the default run has "
        "none at its end",
        needs=("rollout/malformed_calls", "rollout/turns"),
        explains=("hacking", "lengths", "cut_actions", "turn_limit", "too_hard", *_OUTCOME),
    ),
    Rule(
        name="lengths",
        check=first.lengths,
        limit=2.0,
        reason="times the tokens of a turn in the first step; in the default run they stay within "
        "a tenth. They also have to come near rollout.max_turn_tokens, and success must not rise",
        needs=("rollout/tokens", "rollout/turns"),
        explains=("hacking", "cut_actions", "context", *_OUTCOME),
    ),
    Rule(
        name="hacking",
        check=first.hacking,
        limit=3.5,
        reason="standard errors of the fall of success and of the rise of the return",
        needs=("rollout/success",),
        explains=("too_hard", *_OUTCOME),
    ),
    Rule(
        name="cut_actions",
        check=signal.cut_actions,
        limit=0.25,
        reason="a quarter of the batch teaches only to be shorter; runs that learn have up to a "
        "quarter for a few steps, and 5 % at the end",
        needs=("rollout/stop/max_turn_tokens",),
        explains=("too_hard", *_OUTCOME),
    ),
    Rule(
        name="context",
        check=signal.context,
        limit=0.1,
        reason="episodes that are cut count as failures whatever the policy did",
        needs=("rollout/stop/max_context",),
        explains=("too_hard", *_OUTCOME),
    ),
    Rule(
        name="turn_limit",
        check=signal.turn_limit,
        limit=0.25,
        reason="a quarter of the outcomes is not known; tasks that always last so long have a "
        "limit of their own, which is not counted",
        needs=("rollout/stop/max_turns",),
        explains=("too_hard", *_OUTCOME),
    ),
    Rule(
        name="timeouts",
        check=signal.timeouts,
        limit=0.05,
        reason="who is cut depends on the machine, so one in twenty is already a bias",
        needs=("rollout/stop/timeout",),
        explains=("no_progress",),
    ),
    Rule(
        name="no_gradient",
        check=signal.no_gradient,
        limit=0.0,
        reason="a gradient of exactly 0 comes from no batch with advantages",
        needs=("train/grad_norm", "train/advantage_rms"),
        explains=("too_hard", "hardly_moves", "no_progress"),
    ),
    Rule(
        name="hardly_moves",
        check=signal.hardly_moves,
        limit=0.02,
        reason="of the way to the clip, which the default run reaches in most steps until its "
        "learning rate falls",
        needs=("train/ratio_min", "train/ratio_max"),
        explains=("too_hard", "no_progress"),
    ),
    Rule(
        name="clipped",
        check=signal.clipped,
        limit=0.5,
        reason="of the tokens behind the first minibatch of a step, whose ratios are 1; runs that "
        "learn clip a tenth to a fifth, and half in single steps (the paper of GSPO: 15 %)",
        needs=("train/clipped_fraction",),
        explains=("too_hard", "entropy", "no_progress"),
    ),
    Rule(
        name="too_hard",
        check=signal.too_hard,
        limit=0.01,
        reason="with 8 episodes, 92 % of the groups have no success",
        needs=("eval/success", "rollout/success"),
        explains=_SIGNAL,
    ),
    Rule(
        name="too_easy",
        check=signal.too_easy,
        limit=_NEARLY_ALL,
        reason="the rest is within three standard errors of 256 tasks; the same share as in the "
        "warning before training",
        needs=("eval/success",),
        explains=_SIGNAL,
    ),
    Rule(
        name="entropy",
        check=signal.entropy,
        limit=0.2,
        reason="of the entropy of the first steps. Runs that solve their task fall as far, so the "
        "groups must be without variance and success below 90 % too",
        needs=("train/entropy", "rollout/zero_variance_groups"),
        explains=("no_variance", "few_turns", "no_progress"),
    ),
    Rule(
        name="no_variance",
        check=signal.no_variance,
        limit=0.9,
        reason="one group in ten still teaches, so a run learns, but ten times slower",
        needs=("rollout/zero_variance_groups",),
        explains=("few_turns", "no_progress"),
    ),
    Rule(
        name="few_turns",
        check=signal.few_turns,
        limit=0.4,
        reason="share of the turns with an advantage, in episodes of 3 turns or more; it is 96 % "
        "or more all over the default run, and 25 % where 4 turns share a last reward without "
        "credit",
        episodes=True,
        explains=("no_progress",),
    ),
    Rule(
        name="memorised",
        check=signal.memorised,
        limit=0.3,
        reason="of success, far more than chance between a batch and an evaluation",
        needs=("eval/success", "rollout/success"),
        episodes=True,
    ),
    Rule(
        name="no_progress",
        check=signal.no_progress,
        limit=10,
        reason="steps before which nobody can expect progress",
        needs=("rollout/success",),
    ),
)
"""In the order of causes: what a finding explains is not said again."""


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
