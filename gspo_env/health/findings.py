"""A finding of a rule or of a check: what is wrong, or was seen, and what to change.

`gspo-env doctor` checks a machine and a model, `envs --check` an environment, `diagnose` a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo_env.errors import TrainingError


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Why a run learns nothing, or less than it could; or a fact that a check has seen.

    Example:
        Finding(name="minibatches", text="learner.minibatches is 9, ...", advice="Lower it.")
    """

    name: str
    """Name of the rule or check."""
    text: str
    """What is wrong, with figures."""
    advice: str = ""
    """What to change."""
    hopeless: bool = False
    """Whether no step can ever learn anything."""
    ok: bool = False
    """Whether it is a fact and nothing is wrong."""

    def __str__(self) -> str:
        """Formats the finding for a log line."""
        return f"{self.text} {self.advice}".rstrip()


def show(finding: Finding) -> str:
    """Returns what a terminal shows of a finding."""
    advice = f"\n    Try: {finding.advice}" if finding.advice else ""
    return f"{'ok ' if finding.ok else 'BAD'} {finding.name}: {finding.text}{advice}"


def refuse(finding: Finding, *, strict: bool) -> None:
    """Raises an error if a run must not start or continue with a finding.

    Raises:
        TrainingError: Nothing can be learned, or the run is strict.
    """
    if finding.hopeless:
        raise TrainingError(str(finding))
    if strict:
        raise TrainingError(f"{finding} (only a warning without --strict)")
