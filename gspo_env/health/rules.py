"""The rules of `gspo-env diagnose` that also judge the first steps of a run in progress.

A rule looks at the record of a run and finds one thing that may be wrong with it. It judges the
last quarter of the steps, so a run that wobbled and recovered is not blamed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

from gspo_env.config import Config
from gspo_env.health.findings import Finding
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


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that may be wrong with a run."""

    check: Check
    _: KW_ONLY
    limit: float
    """The threshold that `check` gets."""
    needs: tuple[str, ...]
    """Metrics without which the rule cannot judge."""
    explains: tuple[str, ...]
    """Rules whose findings are consequences of this one; `no_progress` is one of any other."""

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


def rule(
    *, limit: float = 0.0, needs: tuple[str, ...] = (), explains: tuple[str, ...] = ()
) -> Callable[[Check], Rule]:
    """Makes a rule of a function; see `Rule`."""
    return partial(Rule, limit=limit, needs=needs, explains=explains)


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


@rule(limit=0.1, needs=("train/length_biased_groups",))
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


@rule(limit=0.9, needs=("rollout/paid_alike",), explains=("hacking", "no_variance"))
def weak_reward(run: Run, limit: float) -> Explanation | None:
    """The same actions are paid in nearly all tasks, or failures nearly as much as successes."""
    alike, failure = (run.late(f"rollout/{name}") or 0.0 for name in ("paid_alike", "failure_pay"))
    if max(alike, failure) < limit:
        return None
    text = (
        f"In {share(alike)} of the tasks {when(run)}, the same actions, such as an empty answer, "
        "get nearly the highest reward."
        if alike >= limit
        else f"Episodes that fail get {share(failure)} of the reward of those that succeed "
        f"{when(run)}."
    )
    return text, "Attack it (`gspo-env audit ENV`), and read episodes (`gspo-env view RUN`)."


@rule(limit=0.9, needs=("rollout/zero_variance_groups",))
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


@rule(limit=0.01, needs=("train/advantage_rms",))
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


def find_in_first_steps(config: Config, history: History) -> Finding | None:
    """Applies the rules for the first steps to the metrics of a run in progress."""
    run = Run.in_progress(config, history)
    run = replace(run, window=len(run.steps))
    for each, limit in FIRST_STEPS.items():
        if finding := each.find(run, limit):
            if each is weak_reward:
                from gspo_env.health.audits import audit_advice

                finding = replace(finding, advice=audit_advice(config))
            return replace(finding, hopeless=run.late("rollout/turns") == 0.0)
    return None


FIRST_STEPS = {
    truncated: math.inf,
    length_bias: 0.1,
    weak_reward: 0.9,
    no_variance: 1.0,
    gradient: 1.0,
}
"""The rules that also judge the first steps of a run in progress, with their limits there."""


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
