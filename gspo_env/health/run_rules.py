"""The rules of `gspo-env diagnose` that judge a whole run, and the list of all rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gspo_env.config import Config
from gspo_env.errors import above, figure
from gspo_env.health.findings import Finding
from gspo_env.health.rules import (
    Explanation,
    Rule,
    gradient,
    length_bias,
    no_variance,
    quote,
    rule,
    setting,
    share,
    truncated,
    weak_reward,
    when,
)
from gspo_env.runs.evaluations import (
    EvalSnapshot,
    describe_fall,
    return_fall,
    stays_lower,
    success_fall,
)
from gspo_env.runs.names import CONTROL, LATER_TURNS, REPEATED, SPIKE
from gspo_env.runs.run import History, Run

_ROUNDING = {"float32": 1e-3}
"""Mean difference of log-probabilities (nats) that rounding explains, by dtype."""
_HALF_ROUNDING = 0.3
"""The same in half precision."""
_FACTOR, _EARLIEST = 2.0, 4
"""How far a spike of control tokens is above the first steps, and the first step to have one."""


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
    explains=("engine", "clipped", "collapse", "no_variance"),
)
def late_turns(run: Run, limit: float) -> Explanation | None:
    """Engine and trainer agree in first turns and disagree in later ones.

    The bound is that of `engine`.
    """
    bound = _rounding(run) * limit
    first = run.late("train/logprob_diff_turn_1")
    late = {name: value for name in LATER_TURNS if (value := run.late(name)) is not None}
    name = next((name for name, value in late.items() if value > bound), "")
    if first is None or first > bound or not name:
        return None
    return (
        f"Engine and trainer disagree from turn {name.rpartition('_')[2]} on: their "
        f"log-probabilities differ by {above(late[name], bound)} nats there and by {first:.2g} in "
        f"first turns {when(run)}; up to {bound:g} is rounding.",
        "The engine computes long contexts in another way: compare with --engine transformers, "
        "then check its context length, rotary scaling, sliding window and quantised cache; until "
        "it is fixed, --loss.correction mask drops the episodes that drift.",
    )


def _rounding(run: Run) -> float:
    """Returns the mean difference that rounding explains in the dtypes of engine and trainer."""
    dtypes = {run.dtype, run.text("engine.dtype") or run.dtype}
    return max(_ROUNDING.get(dtype, _HALF_ROUNDING) for dtype in dtypes)


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
    bound = _rounding(run) * limit
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
    limit=0.05,
    needs=(REPEATED,),
    explains=("collapse", "tool_calls", "hacking", "no_variance"),
)
def control_tokens(run: Run, limit: float) -> Explanation | None:
    """Control tokens become likely where they are wrong, as before a format collapses.

    Either turns repeat one, though in a sound call another mark is between two equal ones, or their
    probability where another token is sampled is a spike; arXiv 2606.26027.
    """
    before, now = ((at(REPEATED) or 0.0, at(CONTROL) or 0.0) for at in (run.early, run.late))
    if now[0] >= limit:
        text = (
            f"The policy repeats control tokens: {now[0]:.2g} a turn follow the same one "
            f"{when(run)}, and {before[0]:.2g} at first."
        )
    elif now[1] >= max(SPIKE, _FACTOR * before[1]):
        text = (
            "Control tokens, and those that begin a mark of calls, become likely where another "
            f"token is sampled: their probability is {share(now[1])} {when(run)}, and "
            f"{share(before[1])} at first."
        )
    else:
        return None
    return text, (
        "The format of its actions collapses next. Read such turns (`gspo-env view RUN`); reward "
        f"no action for them, lower the learning rate ({setting(run, 'learner.learning_rate')}), "
        "add --loss.kl-coef 0.01 or imitate while training (--imitation)."
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


RULES: tuple[Rule, ...] = (
    failed,
    environment,
    late_turns,
    engine,
    stale,
    control_tokens,
    collapse,
    truncated,
    tool_calls,
    weak_reward,
    hacking,
    length_bias,
    clipped,
    no_variance,
    gradient,
    no_progress,
)
"""In the order of causes: what a finding explains is only named."""


def find_spike(config: Config, history: History) -> Finding | None:
    """Returns a spike of `control_tokens` in a run in progress, if it is new in the last step."""
    short = [(n, {REPEATED: 0.0, CONTROL: m[CONTROL]}) for n, m in history if CONTROL in m]
    findings = [
        control_tokens.find(Run.in_progress(config, part), control_tokens.limit)
        for part in (short[:-1], short)
        if len(part) >= _EARLIEST
    ]
    return findings[-1] if findings and not any(findings[:-1]) else None
