"""`gspo-env rewind`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from gspo_env import __version__
from gspo_env.cli.replay import OfBatch
from gspo_env.errors import ConfigError, figure
from gspo_env.redaction import visible
from gspo_env.settings import settings

if TYPE_CHECKING:
    from gspo_env.types import Episode

_EPISODE = re.compile(r"(?:train-\d{1,15}-)?(\d{1,15})-(\d{1,15})")
_BARS = " ▁▂▃▄▅▆▇█"


@settings
class Rewind(OfBatch):
    """Play on from a turn of a kept episode: the environment repeats what was before it.

    Change the action, the result or the reward of the turn, and see what comes of it and what the
    update does with the edited episode.
    """

    episode: str = "0-0"
    """Its group in the batch and its number in it, or its id, such as `train-45-0-3`."""
    turn: Annotated[int, Ge(1)] = 1
    """The turn, counted from 1."""
    action: str | None = None
    """Another action in this turn."""
    result: str | None = None
    """Another answer of the environment to it; the state of the environment is not changed."""
    reward: float | None = None
    """Another reward of the turn, and of the episode if it ends with it."""
    by: Literal["policy", "expert", "hand", "kept"] = "policy"
    """Who acts from there: the policy, the environment's demonstrator, you, or the episode as it
    was kept."""
    weights: Annotated[int, Ge(0)] | None = None
    """Updates after which the weights of the policy are taken; by default those that the update
    of the step began with."""
    times: Annotated[int, Ge(1)] = 1
    """Times that it is played; the update is taken with the first."""

    def run(self) -> None:
        """Prints the outcomes, and how the update differs with the edited episode."""
        place = _EPISODE.fullmatch(self.episode)
        if place is None:
            raise ConfigError(f"episode is {self.episode!r}; expected its group and number: 0-3")
        if self.by == "hand" and self.times > 1:
            raise ConfigError(f"times is {self.times}, and you play by hand; expected 1")
        print(f"gspo-env {__version__}: loading PyTorch and transformers", flush=True)
        from gspo_env.env.registration import hide_progress_bars, load_agent
        from gspo_env.episodes import render_episode

        hide_progress_bars()
        rewind = load_agent("gspo").rewind(
            *(self.folder, self.step, self.resolved),
            episode=(int(place[1]), int(place[2])),
            turn=self.turn,
        )
        edit = {"action": self.action, "result": self.result, "reward": self.reward}
        how: dict[str, Any] = {"by": self.by}
        if self.by == "hand":
            how = {"hand": partial(_beside, rewind.kept, self.turn - 1)}
        episodes = rewind.play(**edit, **how, times=self.times, weights=self.weights)
        if self.times == 1:
            print(render_episode(episodes[0]))
        print(f"kept      outcome {figure(rewind.kept.outcome, '+.4g')}")
        _print_outcomes([e for e in episodes if not e.failed])
        if not episodes[0].failed and episodes[0].turns:
            _print_difference(rewind.update(episodes[0]), rewind.batch.step)


def _beside(kept: Episode, turns: int, policy: Any, engine: Any) -> Any:
    """Shows the turns before, and lets a person act beside the policy."""
    from gspo_env.cli.play import MODEL_HELP, SharedTurns, ShownEngine

    print(MODEL_HELP)
    for turn in kept.turns[:turns]:
        print(f"{visible(turn.observation)}\nmodel: {visible(turn.text)}")
    engine.engine = ShownEngine(engine.engine, engine.chat)
    return SharedTurns(policy, engine)


def _print_outcomes(episodes: Sequence[Episode]) -> None:
    """Prints the mean, its interval, and the distribution in one line."""
    from gspo_env.compare.stats import paired_interval
    from gspo_env.runs.evaluations import wilson_interval

    outcomes = np.array([episode.outcome for episode in episodes])
    if len(outcomes) < 2:
        return
    low, high = paired_interval(outcomes)
    print(f"outcome   {outcomes.mean():z.4g}  (95 % interval {low:z.4g} to {high:z.4g})")
    rate = float(np.mean([episode.success for episode in episodes]))
    low, high = wilson_interval(rate, len(episodes))
    print(f"success   {rate:.1%}  (95 % interval {low:.1%} to {high:.1%})")
    print(f"outcomes  {histogram(outcomes)}")


def histogram(values: np.ndarray[Any, Any]) -> str:
    """Returns how often each value is there, or bars of eight ranges if many values differ.

    Example:
        >>> histogram(np.array([0.0, 1.0, 0.0])), histogram(np.arange(9) ** 2.0)
        ('0: 2, 1: 1', '0 █▂▂▁▂▁▂▂ 64')
    """
    counts = Counter(values.tolist())
    if len(counts) <= 6:
        return ", ".join(f"{figure(value, '.4g')}: {counts[value]}" for value in sorted(counts))
    sizes = np.histogram(values, bins=8)[0]
    bars = (_BARS[-(-8 * int(size) // int(sizes.max()))] for size in sizes)
    return f"{values.min():z.4g} {''.join(bars)} {values.max():z.4g}"


def _print_difference(difference: Any, step: int) -> None:
    from gspo_env.cli.compare import print_markdown
    from gspo_env.cli.whatif import HEAD, row
    from gspo_env.report.page import Section, markdown_page

    effects = [row(name, effect) for name, effect in difference.effects.items()]
    columns = (*difference.advantages, *difference.kept_change, difference.edited_change)
    turns = [
        [str(k + 1), *(f"{c[k]:+z.3f}" if k < len(c) else "" for c in columns)]
        for k in range(max(map(len, columns)))
    ]
    head = ["turn", "advantage as kept", "edited", "kept turn, as kept", "edited", "edited turn"]
    text = (
        "Turns: their advantage in the episode, and by how many nats the update changes the "
        "log-probability of the kept turn (as it was, and edited) and of the edited turn."
    )
    title = f"The update of step {step}, as kept and with the edited episode"
    sections = [Section(table=[HEAD, *effects]), Section(table=[head, *turns]), Section(text=text)]
    print_markdown(markdown_page(title, sections))
