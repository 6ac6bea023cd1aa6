"""Notices that a policy has become much worse than it was at the best evaluation.

Success or return has to be 5 standard errors (of two independent samples of episodes) below the
best evaluation, or 3.5 in two evaluations in a row. And one of these has to hold:

- Success is at most half of the best.
- The return is lower by one standard deviation of the returns, and by half of the gain since the
  first evaluation (half of the best, if there was no gain).
- Half as much is lost, and the tokens or turns of an episode are at most a quarter of those at the
  best, or at least half of the episodes end with an action that was cut, which is at least twice
  the share at the best.

So neither chance nor a policy that goes up and down by less than half is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import NormalDist

from gspo_env.health.startup import Problem
from gspo_env.rollout.metrics import Evaluation
from gspo_env.types import StopReason

_SURE = 5.0
"""Standard errors of a fall that is no chance, although the best is the highest of many."""
_STAYS = 3
"""Evaluations in a row for which a smaller fall has to last."""
_LIKELY = 3.5
"""Standard errors of a fall that is no chance if two evaluations in a row have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSnapshot:
    """How good a policy was in one evaluation."""

    step: int
    episodes: int
    success: float
    mean_return: float
    spread: float
    """Standard deviation of the returns."""
    turns: float | None = None
    tokens: float | None = None
    """Sampled tokens of an episode; None where that is not known."""
    cut: float | None = None
    """Share of the episodes with an action that did not end within the limit of tokens."""

    @classmethod
    def of(cls, step: int, evaluation: Evaluation) -> EvalSnapshot:
        """Returns the level of the sampled episodes of an evaluation."""
        played = [e for group in evaluation.groups for e in group.episodes if not e.failed]
        what, count = evaluation.sampled, max(1, len(played))
        return cls(
            step=step,
            episodes=len(played),
            success=what.success,
            mean_return=what.mean_return,
            spread=what.return_std,
            turns=what.turns,
            tokens=sum(e.model_tokens for e in played) / count,
            cut=sum(e.stop_reason is StopReason.MAX_TURN_TOKENS for e in played) / count,
        )

    @classmethod
    def recorded(cls, step: int, metrics: Mapping[str, float], episodes: int) -> EvalSnapshot:
        """Returns the level that the metrics of an evaluation say."""
        return cls(
            step=step,
            episodes=episodes,
            success=metrics["eval/success"],
            mean_return=metrics.get("eval/return", 0.0),
            spread=metrics.get("eval/return_std", 0.0),
            turns=metrics.get("eval/turns"),
        )


def may_be_chance(best: EvalSnapshot, last: EvalSnapshot, evaluations: int) -> bool:
    """Returns whether a higher success may be chance, at 5 % over all evaluations.

    The best of many evaluations is high by selection, so the level is divided by their number.
    """
    sure = NormalDist().inv_cdf(1 - 0.05 / max(1, evaluations))
    return success_fall(best, last) < sure


def fallen(levels: Sequence[EvalSnapshot]) -> str:
    """Says what the policy has lost since its best level and not regained; empty if nothing.

    The thresholds are those of `CollapseWatch`, applied to the last level alone.
    """
    if len(levels) < 2:
        return ""

    def fall(count: int, least: float) -> str:
        before = levels[:count]
        best = max(before, key=lambda level: level.success)
        highest = max(before, key=lambda level: level.mean_return)
        return _fall(levels[0], best, highest, levels[count], least)

    last = len(levels) - 1
    text = fall(last, _SURE)
    if not text and last > 1 and fall(last - 1, _LIKELY):
        text = fall(last, _LIKELY)
    return text


def stays_lower(levels: Sequence[EvalSnapshot]) -> str:
    """Says that success was higher than in each of the last evaluations; empty if it was not.

    Success and return of each are below those of the best evaluation by more than chance. The fall
    may be smaller than that of `fallen`, since a policy that only goes up and down comes back.
    """
    before, after = levels[:-_STAYS], levels[-_STAYS:]
    if not before:
        return ""
    best = max(before, key=lambda level: level.success)
    if any(min(success_fall(best, now), return_fall(best, now)) < _SURE for now in after):
        return ""
    return _say("success", f"{after[-1].success:.1%}", f"{best.success:.1%}", after[-1], best)


@dataclass(slots=True)
class CollapseWatch:
    """Compares each evaluation with the best so far; says a collapse once."""

    say: Callable[[Problem], None]
    said: bool = False
    _first: EvalSnapshot | None = field(default=None, init=False)
    _success: EvalSnapshot | None = field(default=None, init=False)
    """The evaluation with the best success."""
    _return: EvalSnapshot | None = field(default=None, init=False)
    """The evaluation with the best return."""
    _low: bool = field(default=False, init=False)
    """Whether the last evaluation would be a collapse if the present one is."""

    def see(self, now: EvalSnapshot) -> None:
        """Takes the next evaluation; says what fell since the best."""
        if self._first is None or self._success is None or self._return is None:
            self._first = self._success = self._return = now
            return
        levels = self._first, self._success, self._return, now
        text = _fall(*levels, _SURE) or (_fall(*levels, _LIKELY) if self._low else "")
        self._low = bool(_fall(*levels, _LIKELY))
        if text and not self.said:
            self.said = True
            self.say(
                Problem(
                    name="collapse",
                    text=f"{text}: the policy may have collapsed; a lower learning rate, "
                    "loss.kl-coef or fewer minibatches make the next run steadier",
                )
            )
        if now.success > self._success.success:
            self._success = now
        if now.mean_return > self._return.mean_return:
            self._return = now


def _fall(
    first: EvalSnapshot, best: EvalSnapshot, highest: EvalSnapshot, now: EvalSnapshot, least: float
) -> str:
    """Says what fell; empty if nothing did.

    Args:
        first: The first evaluation.
        best: The one with the best success.
        highest: The one with the best return.
        now: The present one.
        least: Standard errors that a fall needs.
    """
    gain = highest.mean_return - first.mean_return
    scale = gain / 2 if gain > 0 else abs(highest.mean_return) / 2
    lost = best.success - now.success, highest.mean_return - now.mean_return
    large = best.success / 2, max(scale, highest.spread, now.spread)
    sure = success_fall(best, now) >= least, return_fall(highest, now) >= least
    if sure[0] and lost[0] >= large[0]:
        return _say("success", f"{now.success:.1%}", f"{best.success:.1%}", now, best)
    if sure[1] and lost[1] >= large[1]:
        values = f"{now.mean_return:.3g}", f"{highest.mean_return:.3g}"
        return _say("return", *values, now, highest)
    for n, then in enumerate((best, highest)):
        if sure[n] and lost[n] >= large[n] / 2 and (text := _shape(then, now)):
            return text
    return ""


def _shape(then: EvalSnapshot, now: EvalSnapshot) -> str:
    """Says whether episodes have become much shorter, or actions are cut."""
    for name in ("tokens", "turns"):
        here, before = getattr(now, name), getattr(then, name)
        if None not in (here, before) and here <= before / 4:
            return _say(f"{name} of an episode", f"{here:.1f}", f"{before:.1f}", now, then)
    if now.cut is not None and now.cut >= max(0.5, 2 * (then.cut or 0.0)):
        what = "episodes cut at rollout.max_turn_tokens"
        return _say(what, f"{now.cut:.0%}", f"{then.cut or 0.0:.0%}", now, then, "rose")
    return ""


def _say(
    what: str, value: str, before: str, now: EvalSnapshot, then: EvalSnapshot, verb: str = "fell"
) -> str:
    return f"{what} {verb} to {value} after step {now.step}, from {before} after step {then.step}"


def success_fall(best: EvalSnapshot, now: EvalSnapshot) -> float:
    """Returns the standard errors by which success is lower than at the best; 0 if it is not."""
    spreads = [level.success * (1 - level.success) for level in (best, now)]
    return _z(best.success - now.success, spreads, best, now)


def return_fall(best: EvalSnapshot, now: EvalSnapshot) -> float:
    """Returns the standard errors by which the return is lower than at the best, or 0."""
    return _z(best.mean_return - now.mean_return, [best.spread**2, now.spread**2], best, now)


def _z(drop: float, variances: Sequence[float], best: EvalSnapshot, now: EvalSnapshot) -> float:
    """Returns a fall in standard errors, with the variance of both samples together.

    So a handful of episodes without any spread proves nothing: `z` is at most the root of the
    number of episodes in both.
    """
    counts = (best.episodes, now.episodes)
    if not all(counts) or not drop > 0:
        return 0.0
    total = sum(counts)
    within = sum(n * v for n, v in zip(counts, variances, strict=True)) / total
    between = counts[0] * counts[1] * (drop / total) ** 2
    return drop / sqrt((within + between) * (1 / counts[0] + 1 / counts[1]))
