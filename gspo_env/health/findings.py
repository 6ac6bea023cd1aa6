"""A finding of a rule or of a check: what is wrong with a run, and what to change."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_env.errors import TrainingError


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Why a run learns nothing, or less than it could.

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

    def __str__(self) -> str:
        """Formats the finding for a log line."""
        return f"{self.text} {self.advice}".rstrip()


def refuse(finding: Finding, *, strict: bool) -> None:
    """Raises an error if a run must not start or continue with a finding.

    Raises:
        TrainingError: Nothing can be learned, or the run is strict.
    """
    if finding.hopeless:
        raise TrainingError(str(finding))
    if strict:
        raise TrainingError(f"{finding} (only a warning without --strict)")
