"""Decides which groups may be played and trained on, so that none is older than allowed.

The version of the weights is the number of updates that are done. A group that was admitted at
version v and is part of the update that ends version u is u - v versions old.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class StalenessGate:
    """Counts groups by the version of the weights at which they were admitted.

    A group is admitted only while `admitted - dropped < batch * (version + max_staleness + 1)`.
    That counts groups that are played, that wait for the learner, and that were trained on; one
    that is sampled again, or is too old, gives its place back.

    So at version u there are at most `batch * (max_staleness + 1)` groups that were not trained on.
    `choose` takes the oldest that are ready, and only if all others can still be trained on in
    time. Both together keep every group within `max_staleness`, without dropping any.

    Example:
        >>> admission = Admission(batch=2, max_staleness=0)
        >>> [admission.admit(n) for n in (0, 1)], admission.room
        ([None, None], 0)
        >>> admission.choose({0}), admission.choose({0, 1})
        (None, [0, 1])
        >>> admission.train([0, 1], version=1), admission.room
        (None, 2)
    """

    batch: int
    """Groups of an update."""
    max_staleness: int
    version: int = 0
    admitted: int = 0
    """Groups that were admitted, those of finished updates included."""
    dropped: int = 0
    """Groups that gave their place back."""
    ages: dict[int, int] = field(default_factory=dict)
    """The version at which each group was admitted that is played or waits, by its number."""

    @property
    def room(self) -> int:
        """The number of groups that may be admitted now."""
        most = self.batch * (self.version + self.max_staleness + 1)
        return most - (self.admitted - self.dropped)

    def admit(self, number: int) -> None:
        """Admits a group at the present version."""
        self.ages[number] = self.version
        self.admitted += 1

    def drop(self, number: int) -> None:
        """Takes the place of a group back; it may be admitted again."""
        del self.ages[number]
        self.dropped += 1

    def choose(self, ready: Collection[int]) -> list[int] | None:
        """Returns the groups of the next update; None if the learner has to wait.

        The oldest ready groups are taken. That leaves the best chance to the others: the n-th
        oldest of them can be trained on `1 + n // batch` versions later, where it must not be
        older than `max_staleness`.

        Args:
            ready: Numbers of the groups that are played.
        """
        oldest = sorted(self.ages, key=lambda number: (self.ages[number], number))
        chosen = [number for number in oldest if number in ready][: self.batch]
        if len(chosen) < self.batch:
            return None
        taken = set(chosen)
        others = [number for number in oldest if number not in taken]
        in_time = all(self._age_later(n, number) for n, number in enumerate(others))
        return sorted(chosen) if in_time else None

    def _age_later(self, n: int, number: int) -> bool:
        """Returns whether the n-th oldest other group is young enough when its turn comes."""
        version = self.version + 1 + n // self.batch
        return version - self.ages[number] <= self.max_staleness

    def train(self, numbers: Collection[int], version: int) -> None:
        """Notes that an update trained on groups and ended in a version."""
        for number in numbers:
            del self.ages[number]
        self.version = version
