"""The rules of `gspo-env diagnose`; some of them also judge the first steps of a run in progress.

A rule looks at the record of a run and finds one thing that may be wrong with it. It judges the
last quarter of the steps, so a run that wobbled and recovered is not blamed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gspo_env.config import Config
from gspo_env.errors import above, figure
from gspo_env.health.findings import Finding
from gspo_env.runs.evaluations import (
    EvalSnapshot,
    describe_fall,
    return_fall,
    stays_lower,
    success_fall,
)
from gspo_env.runs.run import History, Run

Explanation = tuple[str, str]
"""What is wrong, and what to try."""
Check = Callable[[Run, float], Explanation | None]

IMITATE = (
    "Let the model imitate first: --recipe imitate takes the environment's expert_action if it has "
    "one, or --teacher MODEL the successful episodes of a stronger model, or --conversations FILE. "
    "Or use easier tasks, or rewards for parts of the way."
)
_LONGEST = 160
"""Characters of a quoted text."""
_ROUNDING = {"float32": 1e-3}
"""Mean difference of log-probabilities (nats) that rounding explains, by dtype."""
_HALF_ROUNDING = 0.3
"""The same in half precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One thing that may be wrong with a run."""

    check: Check
    limit: float
    """The threshold that `check` gets."""
    needs: tuple[str, ...]
    """Metrics without which the rule cannot judge."""
    explains: tuple[str, ...]
    """Rules whose findings are consequences of this one; `no_progress` is one of any other."""
    at_start: float | None
    """The threshold for the first steps of a run in progress; None: not used there."""

    @property
    def name(self) -> str:
        """The name of the rule."""
        return self.check.__name__

    def judges(self, run: Run) -> bool:
        """Returns whether the run has the metrics that the rule needs."""
        return all(name in run.series for name in self.needs)

    def find(self, run: Run, limit: float) -> Finding | None:
        """Returns what is wrong; None if nothing is, or the rule cannot judge."""
        explanation = self.check(run, limit) if self.judges(run) else None
        if explanation is None:
            return None
        return Finding(name=self.name, text=explanation[0], advice=explanation[1])


def find_in_first_steps(config: Config, history: History) -> Finding | None:
    """Applies the rules for the first steps to the metrics of a run in progress."""
    run = Run.in_progress(config, history)
    run = replace(run, window=len(run.steps))
    for each in RULES:
        if each.at_start is not None and (finding := each.find(run, each.at_start)):
            return replace(finding, hopeless=run.late("rollout/turns") == 0.0)
    return None


RULES: list[Rule] = []
"""In the order of causes: what a finding explains is only named."""


def rule(
    *,
    limit: float = 0.0,
    needs: tuple[str, ...] = (),
    explains: tuple[str, ...] = (),
    at_start: float | None = None,
) -> Callable[[Check], Check]:
    """Adds a function to the rules; see `Rule`."""

    def add(check: Check) -> Check:
        new_rule = Rule(check=check, limit=limit, needs=needs, explains=explains, at_start=at_start)
        RULES.append(new_rule)
        return check

    return add


@rule()
def failed(run: Run, limit: float) -> Explanation | None:
    """An error ended the run."""
    if not run.failure:
        return None
    return (
        f"An error ended the run after step {max(run.steps, default=0)}: "
        f"{quote(run.failure, 400)}.",
        "Do what the message says, then resume with `gspo-env train --resume RUN`.",
    )


@rule(limit=0.05, needs=("rollout/lost_episodes",))
def environment(run: Run, limit: float) -> Explanation | None:
    """Episodes are lost because their environment fails; of groups of 8, every third loses one."""
    lost = (run.late("rollout/lost_episodes") or 0.0) / run.episodes_per_step
    if lost < limit:
        return None
    first = run.environment_error.partition("\n")[0]
    cause = f" The first failure: {quote(first)}." if first else ""
    return (
        f"The environment fails: {share(lost)} of the episodes are lost {when(run)}.{cause}",
        "Fix the environment (`gspo-env envs --check ID` finds faults); `--max-retries` plays "
        "failed episodes again, `--isolation process` survives crashes.",
    )


@rule(
    limit=1.0,
    needs=("train/logprob_diff_mean",),
    explains=("stale", "clipped", "collapse", "no_variance"),
)
def engine(run: Run, limit: float) -> Explanation | None:
    """Engine and trainer disagree about the log-probabilities of the same tokens.

    The bound is that of the check after each update. Tokens that older weights sampled differ for
    another reason; of runs that play ahead, only that check counts.
    """
    ahead = (run.number("supply.max_staleness") or 0.0) > 0
    difference = run.late("train/sync_logprob_diff" if ahead else "train/logprob_diff_mean")
    dtypes = {run.dtype, run.text("engine.dtype") or run.dtype}
    bound = max(_ROUNDING.get(dtype, _HALF_ROUNDING) for dtype in dtypes) * limit
    if difference is None or difference <= bound:
        return None
    return (
        "Engine and trainer disagree: their log-probabilities of the sampled tokens differ by "
        f"{above(difference, bound)} nats on average {when(run)}; up to {bound:g} is rounding.",
        "Try --engine transformers to see whether the engine is the cause, and the same dtype for "
        "both; until it is fixed, --loss.correction truncated reweights the difference.",
    )


@rule(limit=0.5, needs=("rollout/staleness_mean",), explains=("clipped", "collapse", "no_variance"))
def stale(run: Run, limit: float) -> Explanation | None:
    """Episodes are so old that their ratios start outside the clip range.

    The default run has none there, a small run that plays one update ahead a third.
    """
    age, outside = run.late("rollout/staleness_mean"), run.late("train/ratio_outside_clip")
    if not age or outside is None or outside < limit or run.solved:
        return None
    return (
        f"Episodes are too old: they are {age:.2g} updates behind on average {when(run)}, and "
        f"that alone takes {share(outside)} of the ratios outside the clip range.",
        f"Lower --max-staleness ({setting(run, 'supply.max_staleness')}) or the learning rate "
        f"({setting(run, 'learner.learning_rate')}), and keep --loss.correction truncated.",
    )


@rule(
    limit=3.5,
    needs=("rollout/success",),
    explains=("clipped", "tool_calls", "truncated", "hacking", "no_variance"),
)
def collapse(run: Run, limit: float) -> Explanation | None:
    """Success or return is much lower than it was, and the return has not risen.

    A return that has risen by so many standard errors is a matter of the rule `hacking`. Smaller
    falls count if the last three evaluations, or tenths of the training, all have them.
    """
    text = ""
    evaluations = run.evaluations
    if len(evaluations) > 1 and return_fall(evaluations[-1], evaluations[0]) < limit:
        text = describe_fall(evaluations)
    if not text and _fixed_tasks(run):
        text = stays_lower(evaluations) or stays_lower(_tenths(run))
    if not text:
        return None
    return (
        f"The policy has collapsed: {text}.",
        f"Lower the learning rate ({setting(run, 'learner.learning_rate')}), use fewer minibatches "
        f"({setting(run, 'learner.minibatches')}) or add --loss.kl-coef 0.01; the best checkpoint "
        "is in checkpoints/best.",
    )


def _fixed_tasks(run: Run) -> bool:
    """Returns whether training tasks stay equally hard, as without a curriculum."""
    return run.text("curriculum.name") in ("", "none")


def _tenths(run: Run) -> Sequence[EvalSnapshot]:
    """Returns how good the policy was in each tenth of the training."""
    size = max(3, math.ceil(len(run.steps) / 10))
    starts = range(0, len(run.steps) - size + 1, size)
    ends = [*starts[1:], len(run.steps)]
    parts = [run.training(run.steps[start:end]) for start, end in zip(starts, ends, strict=False)]
    return [part for part in parts if part is not None]


_LIMITS = {
    "max_turn_tokens": (0.25, "end with an action truncated at rollout.max_turn_tokens"),
    "max_context": (0.1, "end because the next action does not fit into rollout.max_context"),
    "max_turns": (0.25, "reach rollout.max_turns before they end"),
    "timeout": (0.05, "reach rollout.episode_timeout while the policy acts"),
}
"""Share of the episodes from which a stop reason counts, and what happens to them.

A quarter of truncated actions teaches only to be shorter. Episodes without context count as
failures whatever the policy did. Timeouts depend on the machine, so few are already a bias.
"""


@rule(
    limit=1.0,
    needs=("rollout/turns",),
    explains=("tool_calls", "hacking", "no_variance", "gradient"),
    at_start=math.inf,
)
def truncated(run: Run, limit: float) -> Explanation | None:
    """Episodes end at a limit of the rollout, or have no turn at all.

    The limit scales the shares of `_LIMITS`.
    """
    reasons = {name: run.late(f"rollout/stop/{name}") or 0.0 for name in _LIMITS}
    if (run.late("rollout/turns") or 0.0) <= 0.1:
        most = max(reasons, key=lambda name: reasons[name])
        return (
            f"Episodes have no turn {when(run)}: they end by {most} before anything is sampled.",
            f"Raise {_flag(run, most)}, or lower --max-turn-tokens, so that an action fits.",
        )
    if run.solved or math.isinf(limit):  # tasks may last exactly that long
        del reasons["max_turns"]
    over = {name: value / _LIMITS[name][0] for name, value in reasons.items()}
    reason = max(over, key=lambda name: over[name])
    if over[reason] < limit and reasons[reason] < 1.0:
        return None
    compaction = ", or add --compaction summary" if reason == "max_context" else ""
    return (
        f"{share(reasons[reason])} of the episodes {_LIMITS[reason][1]} {when(run)}.",
        f"Raise {_flag(run, reason)}, or shorten what fills it: observations, turns, or actions "
        f"of a model that does not end its turns{compaction}.",
    )


def _flag(run: Run, reason: str) -> str:
    """Names the flag of a limit, with its value."""
    return setting(run, f"rollout.{'episode_timeout' if reason == 'timeout' else reason}")


@rule(
    limit=0.1,
    needs=("rollout/malformed_calls", "rollout/turns"),
    explains=("hacking", "no_variance"),
)
def tool_calls(run: Run, limit: float) -> Explanation | None:
    """Tool calls cannot be parsed: a tenth of the turns does nothing."""
    turns = run.late("rollout/turns")
    rate = (run.late("rollout/malformed_calls") or 0.0) / turns if turns else 0.0
    if rate < limit:
        return None
    return (
        f"Tool calls are malformed: {rate:.3g} a turn {when(run)}.",
        "Give malformed calls a negative reward (`error_reward` of a ToolEnv), imitate well-formed "
        f"calls first, and check that {setting(run, 'rollout.max_turn_tokens')}, does not truncate "
        "calls.",
    )


@rule(limit=3.5, needs=("rollout/success",), explains=("no_variance",))
def hacking(run: Run, limit: float) -> Explanation | None:
    """The return rises while success falls, both by so many standard errors."""
    for first, last in run.pairs:
        if success_fall(first, last) >= limit and return_fall(last, first) >= limit:
            return (
                "The reward pays for something else than success: from step "
                f"{first.step} to {last.step}, the return rose from {figure(first.mean_return)} to "
                f"{figure(last.mean_return)} while success fell from {share(first.success)} to "
                f"{share(last.success)}.",
                "Read the best episodes (`gspo-env view RUN`, sorted by return), then reward the "
                "outcome (--advantage outcome, or --score outcome) or lower the rewards of turns.",
            )
    return None


@rule(limit=0.1, needs=("train/length_biased_groups",), at_start=0.1)
def length_bias(run: Run, limit: float) -> Explanation | None:
    """The policy decides when to stop, turns pay, and the estimator fines one more turn."""
    biased = run.late("train/length_biased_groups") or 0.0
    if biased < limit:
        return None
    return (
        f"In {share(biased)} of the groups {when(run)}, turns pay and the policy decides how many "
        f"it plays; there, {run.text('advantage.name')} can pay or fine one more turn whatever it "
        "earns.",
        "Use --advantage returns_to_go, which has no such bias with --loss.aggregation token_sum.",
    )


@rule(limit=0.5, needs=("train/clipped_fraction",), explains=("no_variance",))
def clipped(run: Run, limit: float) -> Explanation | None:
    """Most tokens have no policy gradient because their ratio is clipped.

    Of the tokens after the first minibatch of a step, whose ratios are 1. Runs that learn clip a
    tenth to a fifth (the GSPO paper: 15 %).
    """
    whole = float(run.series["train/clipped_fraction"].values.mean())
    late = run.late("train/clipped_fraction") or 0.0
    minibatches = run.number("learner.minibatches") or 1.0
    unclipped = 1 / minibatches if minibatches > 1 else 0.0
    if max(whole, late) < limit * (1 - unclipped):
        return None
    rate, parts = (setting(run, f"learner.{name}") for name in ("learning_rate", "minibatches"))
    low, high = setting(run, "loss.clip_low"), setting(run, "loss.clip_high")
    return (
        f"Most tokens are clipped: {share(late)} {when(run)} ({share(whole)} over the run) have no "
        "policy gradient.",
        f"Move less in a step: a lower learning rate ({rate}) or fewer minibatches ({parts}); or "
        f"widen the clip range ({low}; {high}).",
    )


@rule(limit=0.9, needs=("rollout/zero_variance_groups",), at_start=1.0)
def no_variance(run: Run, limit: float) -> Explanation | None:
    """The episodes of most groups have equal rewards, so nothing is learned from them."""
    flat = run.late("rollout/zero_variance_groups") or 0.0
    if flat < limit or (run.solved and run.improved):
        return None
    success = run.late("rollout/success") or 0.0
    size, heat = setting(run, "rollout.group_size"), setting(run, "rollout.temperature")
    text = (
        f"In {share(flat)} of the groups, all episodes have equal rewards {when(run)}, so nothing "
        f"is learned from them (success {share(success)})."
    )
    if run.number("rollout.group_size") == 1:
        return text, "Compare several episodes of a task: --group-size 8, now 1."
    before, after = run.early("train/entropy"), run.late("train/entropy")
    if before is not None and after is not None and after <= min(0.2 * before, 0.1):
        return (
            f"{text} The entropy is gone: {after:.2g} nats a token, {before:.2g} at first.",
            f"Lower the learning rate ({setting(run, 'learner.learning_rate')}), add "
            f"--loss.kl-coef 0.01, widen the upper clip ({setting(run, 'loss.clip_high')}) or "
            f"sample hotter ({heat}).",
        )
    if run.settings.get("model") and success == 0.0:
        return text, IMITATE
    return text, (
        "Normal on hard tasks. Use tasks that the policy solves sometimes (arguments of the "
        f"environment, --curriculum ladder), a stronger model, larger groups ({size}), or rewards "
        "for parts of the way."
    )


@rule(limit=0.01, needs=("train/advantage_rms",), at_start=1.0)
def gradient(run: Run, limit: float) -> Explanation | None:
    """Updates are skipped because a number is not finite, or their gradient is 0.

    float16 skips some steps while it finds its loss scale, so there only the last steps count.
    """
    steps = max(1, len(run.steps))
    skipped = run.total("train/skipped_steps") / steps
    if "train/loss_scale" in run.series:
        skipped = run.late("train/skipped_steps") or 0.0
    rate = skipped / max(1.0, run.number("learner.minibatches") or 1.0)
    if rate >= limit:
        return (
            f"{share(rate)} of the optimiser steps were skipped because the loss or its gradient "
            "was not finite.",
            f"Lower the learning rate ({setting(run, 'learner.learning_rate')}), train in float32 "
            "(--model-dtype float32), or correct a custom loss or reward that becomes infinite.",
        )
    if not run.late("train/advantage_rms"):
        return None
    norm = run.late("train/grad_norm")
    if norm is None:
        return (
            f"No sampled token was trained on {when(run)}.",
            "Check that `token_mask` is not false everywhere.",
        )
    if norm > 0 or (run.late("train/clipped_fraction") or 0.0) >= 0.9:
        return None
    return (
        f"The gradient is 0 {when(run)} although advantages are not: no weight changes.",
        "Check that the model is not frozen and that a custom loss depends on `logprobs_N`.",
    )


@rule(limit=10, needs=("rollout/success",))
def no_progress(run: Run, limit: float) -> Explanation | None:
    """Neither success nor return has risen in so many steps."""
    pair = next(run.pairs, None)
    if len(run.steps) < limit or run.improved or run.solved or pair is None:
        return None
    first, last = pair
    tasks = setting(run, "tasks_per_step")
    return (
        f"No progress in {len(run.steps)} steps: success was {share(first.success)} and is "
        f"{share(last.success)}, the return was {figure(first.mean_return)} and is "
        f"{figure(last.mean_return)}.",
        "Start with easier tasks (--curriculum ladder), a stronger model or more imitation."
        if last.success <= 0.01
        else f"Train longer, raise the learning rate ({setting(run, 'learner.learning_rate')}), or "
        f"take more episodes a step ({tasks}; {setting(run, 'rollout.group_size')}); read episodes "
        "with `gspo-env view RUN`.",
    )


def when(run: Run) -> str:
    """Names the steps that `Run.late` covers."""
    count = len(run.steps)
    if run.window >= count:
        return f"in the first {count} steps" if count > 1 else "in the first step"
    return f"in the last {run.window} of {count} steps"


def quote(text: str, longest: int = _LONGEST) -> str:
    """Returns a text on one line without its full stop; the caller escapes it for its medium."""
    line = " ".join(text.split()).removesuffix(".")
    return line if len(line) <= longest else f"{line[: longest - 4]} ..."


def share(value: float) -> str:
    """Formats a share in per cent."""
    return f"{value:.1%}" if 0 < value < 0.1 or 0.9 < value < 1 else f"{value:.0%}"


def setting(run: Run, name: str) -> str:
    """Names the flag of a setting, with its value."""
    value = run.number(name)
    return f"--{name.replace('_', '-')}" + ("" if value is None else f", now {value:g}")
