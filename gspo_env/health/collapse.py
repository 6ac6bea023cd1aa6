"""Detects a policy that has become much worse than it was at its best evaluation.

Success or return has to be 5 standard errors (of two independent samples of episodes) below the
best evaluation, or 3.5 in two evaluations in a row. In addition, one of these must hold:

- Success is at most half of the best.
- The return is lower by one standard deviation of the returns, and by half of the gain since the
  first evaluation (half of the best, if there was no gain).
- Half as much is lost, and episodes have at most a quarter of the tokens or turns of the best
  evaluation, or at least half of them end with a truncated action, twice the share at the best.

So neither chance nor a policy that oscillates by less than half counts as a collapse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

from gspo_env.health.findings import Finding
from gspo_env.rollout.metrics import Evaluation
from gspo_env.types import StopReason

_CERTAIN = 5.0
"""Standard errors of a fall that is not chance, although the best is the highest of many."""
_LIKELY = 3.5
"""Standard errors of a fall that is not chance if two evaluations in a row show it."""
_LASTING = 3
"""Evaluations in a row for which a smaller fall has to last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSnapshot:
    """How good a policy was in one evaluation."""

    step: int
    episodes: int
    success: float
    mean_return: float
    return_std: float
    turns: float | None = None
    tokens: float | None = None
    """Sampled tokens of an episode; None if unknown."""
    truncated: float | None = None
    """Share of the episodes with an action that reached the limit of tokens."""

    @classmethod
    def of(cls, step: int, evaluation: Evaluation) -> EvalSnapshot:
        """Summarises the sampled episodes of an evaluation."""
        episodes = [e for group in evaluation.groups for e in group.episodes if not e.failed]
        stats, count = evaluation.sampled, max(1, len(episodes))
        truncated = sum(e.stop_reason is StopReason.MAX_TURN_TOKENS for e in episodes)
        return cls(
            step=step,
            episodes=len(episodes),
            success=stats.success,
            mean_return=stats.mean_return,
            return_std=stats.return_std,
            turns=stats.turns,
            tokens=sum(e.model_tokens for e in episodes) / count,
            truncated=truncated / count,
        )

    @classmethod
    def from_metrics(
        cls, step: int, metrics: Mapping[str, float], episodes: int, *, prefix: str = "eval"
    ) -> EvalSnapshot:
        """Reads a snapshot from logged metrics; an unknown spread of returns is infinite."""
        return cls(
            step=step,
            episodes=episodes,
            success=metrics[f"{prefix}/success"],
            mean_return=metrics.get(f"{prefix}/return", 0.0),
            return_std=metrics.get(f"{prefix}/return_std", float("inf")),
            turns=metrics.get(f"{prefix}/turns"),
        )


def may_be_chance(best: EvalSnapshot, last: EvalSnapshot, evaluations: int) -> bool:
    """Returns whether a higher success may be chance, at 5 % over all evaluations.

    The best of many evaluations is high by selection, so the level is divided by their number.
    """
    return success_fall(best, last) < NormalDist().inv_cdf(1 - 0.05 / max(1, evaluations))


def find_collapse(evaluations: Sequence[EvalSnapshot]) -> Finding | None:
    """Returns a finding if the last evaluation of a run in progress shows a collapse."""
    text = describe_fall(evaluations)
    if not text:
        return None
    return Finding(
        name="collapse",
        text=f"{text}: the policy may have collapsed.",
        advice="Lower the learning rate, use fewer minibatches or add --loss.kl-coef 0.01.",
    )


def describe_fall(evaluations: Sequence[EvalSnapshot]) -> str:
    """Describes what the policy has lost since its best evaluation; empty if nothing."""
    last = len(evaluations) - 1
    if last < 1:
        return ""
    text = _fall(evaluations, _CERTAIN)
    if not text and last > 1 and _fall(evaluations[:last], _LIKELY):
        text = _fall(evaluations, _LIKELY)
    return text


def stays_lower(evaluations: Sequence[EvalSnapshot]) -> str:
    """Describes a success that was higher than in each of the last evaluations; empty if none.

    Success and return of each are below those of the best evaluation by more than chance. The fall
    may be smaller than that of `describe_fall`, since a policy that only oscillates recovers.
    """
    before, after = evaluations[:-_LASTING], evaluations[-_LASTING:]
    if not before:
        return ""
    best = max(before, key=lambda e: e.success)
    if any(min(success_fall(best, now), return_fall(best, now)) < _CERTAIN for now in after):
        return ""
    return _sentence("success", f"{after[-1].success:.1%}", f"{best.success:.1%}", after[-1], best)


def success_fall(best: EvalSnapshot, now: EvalSnapshot) -> float:
    """Returns the standard errors by which success is lower than at the best; 0 if it is not."""
    variances = [e.success * (1 - e.success) for e in (best, now)]
    return _standard_errors(best.success - now.success, variances, best, now)


def return_fall(best: EvalSnapshot, now: EvalSnapshot) -> float:
    """Returns the standard errors by which the return is lower than at the best, or 0."""
    variances = [best.return_std**2, now.return_std**2]
    return _standard_errors(best.mean_return - now.mean_return, variances, best, now)


def _standard_errors(
    drop: float, variances: Sequence[float], best: EvalSnapshot, now: EvalSnapshot
) -> float:
    """Returns a fall in standard errors, with the variance of both samples together.

    So a handful of episodes without any spread proves nothing: the result is at most the root of
    the number of episodes in both.
    """
    counts = (best.episodes, now.episodes)
    if not all(counts) or not drop > 0:
        return 0.0
    total = sum(counts)
    within = sum(n * v for n, v in zip(counts, variances, strict=True)) / total
    between = counts[0] * counts[1] * (drop / total) ** 2
    return drop / sqrt((within + between) * (1 / counts[0] + 1 / counts[1]))


def _fall(evaluations: Sequence[EvalSnapshot], threshold: float) -> str:
    """Describes what the last evaluation has lost by at least so many standard errors."""
    *before, now = evaluations
    best = max(before, key=lambda e: e.success)
    highest = max(before, key=lambda e: e.mean_return)
    gain = highest.mean_return - before[0].mean_return
    scale = gain / 2 if gain > 0 else abs(highest.mean_return) / 2
    success_drop, return_drop = best.success - now.success, highest.mean_return - now.mean_return
    large_success = best.success / 2
    large_return = max(scale, highest.return_std, now.return_std)
    success_fell = success_fall(best, now) >= threshold
    return_fell = return_fall(highest, now) >= threshold
    if success_fell and success_drop >= large_success:
        return _sentence("success", f"{now.success:.1%}", f"{best.success:.1%}", now, best)
    if return_fell and return_drop >= large_return:
        values = f"{now.mean_return:.3g}", f"{highest.mean_return:.3g}"
        return _sentence("return", *values, now, highest)
    if success_fell and success_drop >= large_success / 2 and (text := _shape(best, now)):
        return text
    if return_fell and return_drop >= large_return / 2:
        return _shape(highest, now)
    return ""


def _shape(best: EvalSnapshot, now: EvalSnapshot) -> str:
    """Describes episodes that have become much shorter, or actions that are truncated."""
    for name in ("tokens", "turns"):
        after, before = getattr(now, name), getattr(best, name)
        if None not in (after, before) and after <= before / 4:
            return _sentence(f"{name} of an episode", f"{after:.1f}", f"{before:.1f}", now, best)
    before_share = best.truncated or 0.0
    if now.truncated is not None and now.truncated >= max(0.5, 2 * before_share):
        what = "episodes truncated at rollout.max_turn_tokens"
        return _sentence(what, f"{now.truncated:.0%}", f"{before_share:.0%}", now, best, "rose")
    return ""


def _sentence(
    what: str,
    value: str,
    before: str,
    now: EvalSnapshot,
    best: EvalSnapshot,
    verb: str = "fell",
) -> str:
    return f"{what} {verb} to {value} after step {now.step}, from {before} after step {best.step}"
