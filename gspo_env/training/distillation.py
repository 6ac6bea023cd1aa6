"""On-policy distillation: a teacher's log-probabilities of the sampled tokens as credit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Interval

from gspo_env.errors import ConfigError
from gspo_env.registry import check_values, find, load_function

if TYPE_CHECKING:
    from gspo_env.chat.transcript import ChatTokenizer
    from gspo_env.learner.settings import Trainer
    from gspo_env.rollout.collector import Collector
    from gspo_env.training.teacher import BoundDistillation
    from gspo_env.types import FloatArray, Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Distillation:
    """The log-ratio of a teacher and the policy as the advantage of each token.

    A_t = weight * sum over l >= t of gamma^(l-t) (log p_teacher,l - log p_policy,l) + credit * C_t,
    where C_t is the advantage of another estimator. With `gamma = 0` the expected update is the
    gradient of the reverse KL of each token, in the contexts that the policy visits; with
    `gamma = 1` it is that of the KL of whole episodes (exactly with `loss.aggregation token_sum`).

    Source:
        On-policy distillation: arXiv 2306.13649; the depth that grows: arXiv 2604.24005.
    """

    teacher: str = "self"
    """A folder or name of a model with the policy's tokenizer, such as an earlier run; or `self`,
    the policy as it is now, which needs a hint."""
    hint: str = ""
    """Key of the `info` of `reset` with a text that only the teacher reads, in its system prompt,
    such as `solution`."""
    weight: Annotated[float, Ge(0)] = 1.0
    """Weight of the teacher."""
    gamma: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Discount of later tokens, per token."""
    turn_steps: Annotated[int, Ge(0)] = 0
    """The teacher is heard in the first turn only, and in one more every so many steps; 0 is in all
    turns from the start."""
    credit: Annotated[float, Ge(0)] = 0.0
    """Weight of the other estimator's advantages; 0 distils alone."""
    estimator: str = "returns_to_go"
    """Name of the other estimator, which has its default settings."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        check_values(self)
        find("advantage", self.estimator)

    @property
    def uses_score(self) -> bool:
        """Whether the other estimator reads `Group.score`."""
        return bool(self.credit) and getattr(find("advantage", self.estimator), "uses_score", True)

    def advantages(self, group: Group) -> Sequence[FloatArray]:
        """Raises an error: a run calls `bind` first."""
        raise ConfigError("the estimator 'distillation' has no teacher; expected a call of bind()")

    def check_config(self) -> None:
        """Checks the teacher before anything is trained.

        Raises:
            ConfigError: There is no teacher.
            ModelError: The teacher is no model.
        """
        if self.teacher != "self":
            self._tokenizer()
        elif not self.hint:
            raise ConfigError(
                "teacher is 'self' and hint is ''; expected a hint such as solution, or the folder "
                "of another model: a teacher that reads the same agrees with the policy"
            )

    def check_tokenizer(self, chat: ChatTokenizer) -> None:
        """Checks that the teacher has the policy's tokenizer.

        Raises:
            ConfigError: It has another one.
        """
        if self.teacher != "self" and self._tokenizer().get_vocab() != chat.tokenizer.get_vocab():
            raise ConfigError(
                f"teacher is {self.teacher!r}, whose tokenizer is not the policy's; expected a "
                "model with the same token ids"
            )

    def _tokenizer(self) -> Any:
        return load_function("gspo_env.model.load:load_tokenizer", "teacher")(self.teacher)

    def bind(self, learner: Trainer, collector: Collector) -> BoundDistillation:
        """Loads the teacher.

        Args:
            learner: Trains the policy.
            collector: Has the policy's tokenizer and temperature.

        Raises:
            ConfigError: There is no teacher, or it has another tokenizer.
            ModelError: The teacher cannot be loaded.
        """
        self.check_config()
        self.check_tokenizer(collector.chat)
        bind = load_function("gspo_env.training.teacher:bind", "teacher")
        bound: BoundDistillation = bind(self, learner, collector)
        return bound
