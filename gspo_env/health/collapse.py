"""Detects a policy that has become much worse than it was at its best evaluation.

Success or return has to be 5 standard errors (of two independent samples of episodes) below the
best evaluation, or 3.5 in two evaluations in a row. In addition, one of these must hold:

- Success is at most half of the best.
- The return is lower by one standard deviation of the returns, and by half of the gain since the
  first evaluation (half of the best, if there was no gain).

So neither chance nor a policy that oscillates by less than half counts as a collapse.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

from gspo_env.health.findings import Finding
from gspo_env.runs.evaluations import EvalSnapshot, return_fall, success_fall

_CERTAIN = 5.0
"""Standard errors of a fall that is not chance, although the best is the highest of many."""
_LIKELY = 3.5
"""Standard errors of a fall that is not chance if two evaluations in a row show it."""
_LASTING = 3
"""Evaluations in a row for which a smaller fall has to last."""


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


def _fall(evaluations: Sequence[EvalSnapshot], threshold: float) -> str:
    """Describes what the last evaluation has lost by at least so many standard errors."""
    *before, now = evaluations
    best = max(before, key=lambda e: e.success)
    highest = max(before, key=lambda e: e.mean_return)
    gain = highest.mean_return - before[0].mean_return
    scale = gain / 2 if gain > 0 else abs(highest.mean_return) / 2
    success_drop, return_drop = best.success - now.success, highest.mean_return - now.mean_return
    if success_fall(best, now) >= threshold and success_drop >= best.success / 2:
        return _sentence("success", f"{now.success:.1%}", f"{best.success:.1%}", now, best)
    large = max(scale, highest.return_std, now.return_std)
    if return_fall(highest, now) >= threshold and return_drop >= large:
        values = f"{now.mean_return:.3g}", f"{highest.mean_return:.3g}"
        return _sentence("return", *values, now, highest)
    return ""


def _sentence(what: str, value: str, before: str, now: EvalSnapshot, best: EvalSnapshot) -> str:
    return f"{what} fell to {value} after step {now.step}, from {before} after step {best.step}"
