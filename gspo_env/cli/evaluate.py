"""`gspo-env evaluate`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from annotated_types import Ge, Interval

from gspo_env.errors import ConfigError, RolloutError
from gspo_env.redaction import visible
from gspo_env.seeding import SEEDS
from gspo_env.settings import settings
from gspo_env.types import Group

if TYPE_CHECKING:
    from gspo_env.training.split import Split


@settings
class Evaluate:
    """Play the tasks of an evaluation with a trained folder, a hub model or a scripted agent."""

    folder: tyro.conf.Positional[str] = ""
    """Folder of a run, such as runs/Lookup-v0-seed0-1; the same as `--model`."""
    model: str = ""
    """A trained folder, a hub id, or `scripted`."""
    step: Annotated[int, Ge(0)] | None = None
    """Step of the run whose weights to use; the newest by default."""
    best: bool = False
    """Whether to use the weights of the best evaluation."""
    model_dtype: Literal["", "auto", "float32", "bfloat16", "float16"] = ""
    """The dtype of the weights; a trained folder's own setting by default."""
    env: tuple[str, ...] = ()
    """Environment, or several as in `train`; a trained folder's own by default."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, such as `hops=4`; they are added to a folder's own."""
    engine: str = ""
    """Engine that samples the actions; a trained folder's own by default."""
    tasks: Annotated[int, Ge(0)] | Literal["all"] = 0
    """Tasks, or `all` of an environment that has a list of them; by default as many as the folder's
    training held out, or 256."""
    samples: Annotated[int, Ge(1)] = 1
    """Episodes of each task, for pass@k and pass^k."""
    repeat: Annotated[int, Ge(1)] = 1
    """Times that all of it is played, to see by how much two evaluations differ by chance."""
    seed: Annotated[int, Interval(ge=0, lt=SEEDS)] | None = None
    """Seed of the sampling; 0 by default."""
    temperature: Annotated[float, Ge(0)] | None = None
    """Sampling temperature; that of the training by default, 0 is greedy."""
    max_turn_tokens: Annotated[int, Ge(1)] | None = None
    """Most tokens of an action; those of the training by default."""
    show: Annotated[int, Ge(0)] = 0
    """Episodes to print, with all that the model read and wrote."""

    def run(self) -> None:
        """Prints success with a 95 % interval."""
        from gspo_env import __version__
        from gspo_env.env.registration import load_agent

        if bool(self.model) == bool(self.folder):
            raise ConfigError(
                f"model is {self.model!r} and the folder is {self.folder!r}; expected one: a "
                "folder, a hub id or 'scripted'"
            )
        model = self.model or self.folder
        from gspo_env.cli.options import one_or_several
        from gspo_env.health.startup import check_first_evaluation
        from gspo_env.model.weights import find_weights
        from gspo_env.tracking.console import Progress

        if model == "scripted":
            if len(self.env) > 1:
                raise ConfigError(f"env is {' '.join(self.env)}; expected one for 'scripted'")
            unused = ("seed", "temperature", "max_turn_tokens", "model_dtype", "engine")
            for name in (*unused, "step", "best"):
                value = getattr(self, name)
                if value not in (None, "") and value is not False:  # 0 is a value
                    raise ConfigError(
                        f"{name} is {value}, and a scripted agent samples nothing; expected none"
                    )
            env = "".join(self.env) or "gspo/Lookup-v0"
            agent = load_agent("scripted")(env, **self.env_kwargs)
            split = agent.split(self.tasks or 256)
            rounds = [agent.evaluate(split.tasks, self.samples) for _ in range(self.repeat)]
            print_episodes(rounds[0], self.show)
            print_scores(merged(rounds), split)
            print_noise(rounds)
        else:
            weights = find_weights(model, self.step, best=self.best)
            print(f"gspo-env {__version__}: loading {visible(str(weights))}", flush=True)
            names = ("model_dtype", "env_kwargs", "engine")
            changes = {name: value for name in names if (value := getattr(self, name))}
            if self.max_turn_tokens:
                changes["rollout"] = {"max_turn_tokens": self.max_turn_tokens}
            agent = load_agent("gspo").load(
                model, one_or_several(self.env), step=self.step, best=self.best, **changes
            )
            split = agent.split(self.tasks)
            times = f", {self.repeat} times" * (self.repeat > 1)
            print(f"playing {split}, {self.samples} of each, in {agent.env_id}{times}", flush=True)
            with Progress() as progress:
                show, done = progress.when_slow(5.0), itertools.count(1)
                rounds = [
                    agent.evaluate(
                        split.tasks,
                        self.samples,
                        ((self.seed or 0) + n) % SEEDS,
                        temperature=self.temperature,
                        on_group=lambda: show(
                            "evaluation", next(done), len(split.tasks) * self.repeat
                        ),
                    )
                    for n in range(self.repeat)
                ]
            groups = merged(rounds)
            print_episodes(rounds[0], self.show, agent.chat.decode_all)
            print_scores(groups, split)
            print_noise(rounds)
            for finding in check_first_evaluation(agent.config, groups, "in this evaluation"):
                print(f"note     {finding}")


def print_episodes(
    groups: Sequence[Group], count: int, decode: Callable[[Sequence[int]], str] | None = None
) -> None:
    """Prints an episode of each of the first groups, and then further ones of the same tasks."""
    from gspo_env.episodes import render_episode

    rounds = itertools.zip_longest(*(group.episodes for group in groups))
    episodes = (episode for row in rounds for episode in row if episode is not None)
    for episode in itertools.islice(episodes, count):
        print(render_episode(episode, decode))


def merged(rounds: Sequence[Sequence[Group]]) -> list[Group]:
    """Joins the groups of each task."""
    return [
        replace(groups[0], episodes=tuple(e for group in groups for e in group.episodes))
        for groups in zip(*rounds, strict=True)
    ]


def print_noise(rounds: Sequence[Sequence[Group]]) -> None:
    """Prints how much evaluations of the same tasks differ by chance, if there are several."""
    from statistics import fmean, stdev

    episodes = [[e for group in groups for e in group.episodes] for groups in rounds]
    wins = [[bool(e.success) for e in row if not e.failed] for row in episodes]
    rates = [fmean(row) for row in wins if row]
    if len(rates) < 2:
        return
    spread, flips = stdev(rates), []
    for same in zip(*episodes, strict=True):
        ends = [bool(e.success) for e in same if not e.failed]
        if len(ends) > 1:
            pairs = len(ends) * (len(ends) - 1) / 2
            flips.append(sum(ends) * (len(ends) - sum(ends)) / pairs)
    print(
        f"noise    success of {len(rates)} evaluations {min(rates):.1%} to {max(rates):.1%}, "
        f"standard deviation {100 * spread:.1f} points; two differ by up to "
        f"{196 * 2**0.5 * spread:.1f} by chance (95 %)"
    )
    if flips:
        print(f"flips    {fmean(flips):.1%} of the episodes end otherwise in another evaluation")


def print_scores(groups: Sequence[Group], split: Split) -> None:
    """Prints success, return, turns, pass@k and pass^k."""
    from gspo_env.compare.stats import pass_at_k, pass_hat_k
    from gspo_env.rollout.metrics import by_environment
    from gspo_env.runs.evaluations import success_interval

    rows = [[e for e in group.episodes if not e.failed] for group in groups]
    lost = sum(len(group.episodes) for group in groups) - sum(map(len, rows))
    by_task: dict[str, list[bool]] = {}
    for key, row in zip(split.keys, rows, strict=True):
        if row:
            by_task.setdefault(key, []).extend(bool(e.success) for e in row)
    wins = [[bool(e.success) for e in row] for row in rows if row]
    if not wins:
        raise RolloutError(f"all {lost} episodes failed in their environment; there is no score")
    episodes = [e for row in rows for e in row]
    low, high = success_interval(list(by_task.values()), tasks=split.distinct)
    size = min(map(len, wins))
    rate = sum(map(sum, wins)) / len(episodes)
    print(f"success  {rate:.1%}  (95 % interval {low:.1%} to {high:.1%})")
    for name, stats in by_environment(groups).items():
        print(f"         {stats.success:.1%} in {name} ({stats.episodes} episodes)")
    print(f"tasks    {split}" + (f"; {size} samples of each" if size > 1 else ""))
    print(f"return   {sum(float(e.rewards.sum()) for e in episodes) / len(episodes):z.3f}")
    print(f"turns    {sum(len(e.turns) for e in episodes) / len(episodes):.2f}")
    if lost:
        print(f"lost     {lost} episodes, which failed or were not scored; they are not counted")
    for k in sorted({1, size} | {2**n for n in range(1, 10) if 2**n <= size}):
        at = sum(pass_at_k(len(w), sum(w), k) for w in wins) / len(wins)
        hat = sum(pass_hat_k(len(w), sum(w), k) for w in wins) / len(wins)
        print(f"pass@{k:<3} {at:.1%}   pass^{k:<3} {hat:.1%}")
