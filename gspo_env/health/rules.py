"""The rules of `gspo-env diagnose`: each looks at a run and says one thing that may be wrong.

A rule is a function of the evidence and of its threshold. It returns what it found with figures,
and the settings to try; None if it found nothing. `gspo_env.health.diagnose_table.RULES` has the
thresholds with their reasons.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gspo_env.episodes.schema import EpisodeRecord
from gspo_env.health.collapse import (
    EvalSnapshot,
    fallen,
    return_fall,
    stays_lower,
    success_fall,
)
from gspo_env.report.run_record import RunRecord, trained_dtype

Said = tuple[str, str]
"""What is wrong, and what to try."""

SOLVED = 0.9
"""Success from which a run counts as solved: equal episodes and low entropy are its end then."""
_CHANCE = 2.0
"""Standard errors of a rise that is taken for learning; lenient, so that slow runs pass."""
_LONGEST = 160
"""Characters of a quoted text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What the rules look at."""

    run: RunRecord
    episodes: Sequence[EpisodeRecord]
    """Kept training episodes of the last steps; empty if none are kept."""
    first_episodes: Sequence[EpisodeRecord] = ()
    """Kept training episodes of the first steps."""

    @property
    def when(self) -> str:
        """The steps that `RunRecord.late` covers."""
        count, window = len(self.run.steps), self.run.window
        if window == 1:
            return "in the only step" if count == 1 else f"in the last of {count} steps"
        return f"in the last {window} of {count} steps"

    @property
    def levels(self) -> Sequence[EvalSnapshot]:
        """The evaluations, or the beginning and the end of training without two of them."""
        if len(self.run.evaluations) > 1:
            return self.run.evaluations
        pair = [self.run.training(late=late) for late in (False, True)]
        return [level for level in pair if level is not None]

    @property
    def solved(self) -> bool:
        """Whether the policy succeeds nearly always at the end."""
        evaluations = self.run.evaluations[-1:]
        return any(level.success >= SOLVED for level in evaluations) or (
            (self.run.late("rollout/success") or 0.0) >= SOLVED
        )

    @property
    def pairs(self) -> list[tuple[EvalSnapshot, EvalSnapshot]]:
        """The first and the last evaluation, and the beginning and the end of training."""
        levels = self.run.evaluations
        found = [(levels[0], levels[-1])] if len(levels) > 1 else []
        first, last = (self.run.training(late=late) for late in (False, True))
        return [*found, (first, last)] if first is not None and last is not None else found

    @property
    def improved(self) -> bool:
        """Whether success or return rose by more than chance, in evaluations or in training."""
        return any(
            max(success_fall(last, first), return_fall(last, first)) >= _CHANCE
            for first, last in self.pairs
        )

    @property
    def tokens_per_turn(self) -> tuple[float, float] | None:
        """Sampled tokens of a turn in the first step and in the last steps."""
        run, values = self.run, []
        if not len(run.steps):
            return None
        for steps in (run.steps[:1], run.steps[-run.window :]):
            tokens, turns = (run.mean(f"rollout/{name}", steps) for name in ("tokens", "turns"))
            if not tokens or not turns:
                return None
            values.append(tokens / (turns * run.episodes_per_step))
        return values[0], values[1]


def failed(found: Evidence, limit: float) -> Said | None:
    """An error ended the run."""
    if not found.run.failure:
        return None
    return (
        f"An error ended the run after step {max(found.run.steps, default=0)}: "
        f"{quote(found.run.failure, 400)}.",
        "Do what the message says, then go on with `gspo-env train --resume RUN`.",
    )


def environment(found: Evidence, limit: float) -> Said | None:
    """Episodes are lost because their environment fails."""
    run = found.run
    lost = max(run.late("rollout/lost_episodes") or 0.0, 0.0) / run.episodes_per_step
    errors = run.late("rollout/env_errors") or 0.0
    timeouts = run.late("rollout/env_timeouts") or 0.0
    if lost < limit:
        return None
    first = run.environment_error.partition("\n")[0]
    cause = f" The first failure: {quote(first)}." if first else ""
    return (
        f"The environment fails: {share(lost)} of the episodes are lost {found.when} "
        f"({errors:.3g} errors and {timeouts:.3g} timeouts a step).{cause}",
        "Mend the environment (`gspo-env envs --check ID` finds faults); `--max-retries` plays "
        "failed episodes again, `--isolation process` survives crashes.",
    )


def no_turns(found: Evidence, limit: float) -> Said | None:
    """Episodes have no turn."""
    turns = found.run.late("rollout/turns")
    if turns is None or turns > limit:
        return None
    return (
        f"Episodes have no turn {found.when} ({turns:.2g} on average): nothing is sampled. "
        f"{_stops(found.run)}",
        "Raise --max-context, or lower --max-turn-tokens, so that an action fits behind the "
        "first prompt.",
    )


def non_finite(found: Evidence, limit: float) -> Said | None:
    """Optimiser steps are skipped because a number is not finite."""
    run = found.run
    late_only = "train/loss_scale" in run.series  # float16 finds its scale in the first steps
    skipped = run.late("train/skipped_steps") or 0.0
    if not late_only:
        skipped = run.total("train/skipped_steps") / max(1, len(run.steps))
    rate = skipped / max(1.0, run.number("learner.minibatches") or 1.0)
    if rate < limit:
        return None
    return (
        f"{share(rate)} of the optimiser steps were skipped because the loss or its gradient was "
        f"not finite ({run.total('train/skipped_steps'):.0f} in all).",
        f"Lower the learning rate ({now(run, 'learner.learning_rate')}), train in float32 "
        "(--model-dtype float32), or correct a loss or rewards of your own that become infinite.",
    )


def engine(found: Evidence, limit: float) -> Said | None:
    """Engine and trainer give other log-probabilities of the same tokens."""
    from gspo_env.training.weight_check import HALF_TOLERANCE, TOLERANCE

    run = found.run
    # of tokens that older weights sampled, the difference says nothing of the engine
    ahead = (run.number("supply.max_staleness") or 0.0) > 0
    difference = run.late("train/sync_logprob_diff" if ahead else "train/logprob_diff_mean")
    dtypes = {trained_dtype(run), run.text("engine.dtype") or trained_dtype(run)}
    bound = max(TOLERANCE.get(dtype, HALF_TOLERANCE) for dtype in dtypes) * limit
    if difference is None or difference <= bound:
        return None
    outside = run.late("train/ratio_outside_clip")
    more = f", which alone takes {share(outside)} of the ratios outside the clip" if outside else ""
    return (
        "Engine and trainer are apart: their log-probabilities of the sampled tokens differ by "
        f"{difference:.2g} nats on average {found.when}{more}; up to {bound:g} is rounding.",
        "Use --engine transformers to see whether the engine is the cause; give both the same "
        "dtype; until it is mended, --loss.correction truncated weighs the difference out.",
    )


def collapse(found: Evidence, limit: float) -> Said | None:
    """Success or return is much lower than it was, and the return has not risen."""
    levels = found.run.evaluations
    fixed = found.run.text("curriculum.name") in ("", "none")  # else training becomes harder
    text = ""
    for known in (levels, _chunks(found, found.run.window) if fixed else ()):
        if not text and len(known) > 1 and return_fall(known[-1], known[0]) < limit:
            text = fallen(known)
    if fixed:
        text = text or stays_lower(levels) or stays_lower(_chunks(found, _tenth(found)))
    if not text:
        return None
    run = found.run
    return (
        f"The policy has collapsed: {text}.",
        f"Lower the learning rate ({now(run, 'learner.learning_rate')}), use fewer minibatches "
        f"({now(run, 'learner.minibatches')}) or add --loss.kl-coef 0.01; the best checkpoint is "
        "in checkpoints/best.",
    )


def _tenth(found: Evidence) -> int:
    return max(3, math.ceil(len(found.run.steps) / 10))


def _chunks(found: Evidence, size: int) -> tuple[EvalSnapshot, ...]:
    """Returns how good the policy was in each part of the training, of so many steps."""
    run, levels = found.run, []
    steps = run.steps
    names = ("rollout/success", "rollout/return", "rollout/return_std", "rollout/turns")
    for start in range(0, len(steps) - size + 1, size):
        stop = start + size if start + 2 * size <= len(steps) else len(steps)
        means = [run.mean(name, steps[start:stop]) for name in names]
        if means[0] is not None:
            level = EvalSnapshot(
                step=int(steps[stop - 1]),
                episodes=round((stop - start) * run.episodes_per_step),
                success=means[0],
                mean_return=means[1] or 0.0,
                spread=math.inf if means[2] is None else means[2],
                turns=means[3],
            )
            levels.append(level)
    return tuple(levels)


def malformed(found: Evidence, limit: float) -> Said | None:
    """Tool calls cannot be read."""
    run = found.run
    values = []
    for mean in (run.early, run.late):
        calls, turns = mean("rollout/malformed_calls"), mean("rollout/turns")
        if calls is None or not turns:
            return None
        values.append(calls / turns)
    before, after = values
    if after < limit:
        return None
    rising = f"from {before:.3g} to {after:.3g}" if after > 1.5 * before else f"{after:.3g}"
    example = next((text for e in found.episodes for text in _call_errors(e)), "")
    cause = f" One of them: {quote(example)}." if example else ""
    return (
        f"Malformed tool calls {'rise ' if after > 1.5 * before else 'stay high: '}{rising} a turn "
        f"{found.when}.{cause}",
        "Give malformed calls a negative reward (`error_reward` of a ToolEnv), imitate "
        "well-formed calls first, and check that no reward is paid for them; "
        f"{now(run, 'rollout.max_turn_tokens')} may also cut calls.",
    )


def _call_errors(episode: EpisodeRecord) -> Iterator[str]:
    for turn in episode.turns:
        try:
            calls = json.loads(turn.tool_calls or "[]")
            yield from (str(call["error"]) for call in calls if "error" in call)
        except (ValueError, TypeError):
            continue


def lengths(found: Evidence, limit: float) -> Said | None:
    """Actions become longer without more success."""
    run, pair, levels = found.run, found.tokens_per_turn, found.levels
    if pair is None or len(run.steps) < 2:
        return None
    before, after = pair
    most = run.number("rollout.max_turn_tokens")
    cut = run.late("rollout/stop/max_turn_tokens") or 0.0
    near = cut >= 0.05 or (most is not None and after >= most / 2)
    better = len(levels) > 1 and success_fall(levels[-1], levels[0]) >= _CHANCE
    if after < limit * before or not near or better:
        return None
    return (
        f"Lengths run away: a turn has {after:.3g} tokens {found.when}, {after / before:.1f} times "
        f"the {before:.3g} of the first step, and success has not risen ({_change(levels)}); "
        f"{share(cut)} of the episodes end with an action that was cut.",
        "Check that the reward does not pay for length; take a small reward off for each token, "
        "use --loss.aggregation token_sum (no mean over an episode's own length), or "
        f"lower --max-turn-tokens ({now(run, 'rollout.max_turn_tokens')}).",
    )


def hacking(found: Evidence, limit: float) -> Said | None:
    """The return rises while success falls."""
    for first, last in found.pairs:
        if success_fall(first, last) < limit or return_fall(last, first) < limit:
            continue
        return (
            f"The reward pays for something else than success: from step {first.step} to "
            f"{last.step}, the return rose from {first.mean_return:.3g} to {last.mean_return:.3g} "
            f"while success fell from {share(first.success)} to {share(last.success)}.",
            "Read the best episodes (`gspo-env view RUN`, sorted by return), then reward the "
            "outcome (--advantage outcome, or --score outcome) or lower the rewards of the turns.",
        )
    return None


def quote(text: str, longest: int = _LONGEST) -> str:
    """Returns a text on one line without its full stop; the caller escapes it for its medium."""
    line = " ".join(text.split()).removesuffix(".")
    return line if len(line) <= longest else f"{line[: longest - 4]} ..."


def share(value: float) -> str:
    """Formats a share in per cent."""
    return f"{value:.1%}" if 0 < value < 0.1 or 0.9 < value < 1 else f"{value:.0%}"


def now(run: RunRecord, name: str) -> str:
    """Names a setting with its value."""
    value = run.number(name)
    return f"--{name.replace('_', '-')}" + ("" if value is None else f", now {value:g}")


def _change(levels: Sequence[EvalSnapshot]) -> str:
    if len(levels) < 2:
        return "not known"
    return f"{share(levels[0].success)}, now {share(levels[-1].success)}"


def _stops(run: RunRecord) -> str:
    """Names the end reasons of the last steps."""
    shares = {
        name.removeprefix("rollout/stop/"): run.late(name) or 0.0
        for name in run.series
        if name.startswith("rollout/stop/")
    }
    found = [f"{reason} {share(value)}" for reason, value in shares.items() if value > 0]
    return f"They end by {', '.join(found)}." if found else ""


def values_by_turn(episode: EpisodeRecord) -> list[float]:
    """Returns the mean advantage of each turn of an episode that was trained on."""
    rows = [[v for v in turn.advantages or () if v is not None] for turn in episode.turns]
    return [float(np.mean(row)) if row else 0.0 for row in rows]
