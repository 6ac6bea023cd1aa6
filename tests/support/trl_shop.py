"""A class for TRL's `environment_factory`, and reward functions of TRL that read it."""

import random

PRICES = {"apple": 3, "bread": 5, "cheese": 9}


class Shop:
    """Says what goods cost, and takes an answer."""

    def __init__(self):
        self._visits = 0

    def reset(self, goods=None, prompt=None, **row):
        self._visits += 1
        self._goods, self._total, self._asked = goods or random.sample(sorted(PRICES), 2), None, []
        return None if goods == [] else " ".join(self._goods)

    def price(self, good: str) -> int:
        """
        Look up a price.

        Args:
            good: The good.

        Returns:
            The price.
        """
        self._asked.append(good)
        return PRICES[good]

    async def stock(self, good: str, days: int = 1) -> dict:
        """
        Look up what is left.

        Args:
            good: The good.
            days: Days from now.
        """
        return {"good": good, "left": days}

    def answer(self, total: int) -> str:
        """
        Answer.

        Args:
            total: The sum.
        """
        self._total = total
        return "done"

    def get_reward(self) -> float:
        return float(self._total == sum(PRICES[good] for good in self._goods))

    def _hidden(self):
        raise AssertionError


class Counter:
    """Its reward is an attribute."""

    def reset(self, **row):
        self.reward = 0.0
        self._start = random.randrange(10**6)
        return f" from {self._start}"

    def count(self) -> str:
        """Count on."""
        self.reward += 0.5
        return str(random.randrange(10**6))


class Silent:
    """Nothing gives it a reward."""

    def reset(self, **row):
        pass


class Untyped:
    """Its tool cannot be shown."""

    def reset(self, **row):
        pass

    def price(self, good):
        """Look up a price."""


def visits(environments, completions, **columns):
    """TRL's reward: how many goods were looked up, and what else the function was given."""
    seen.append({"environments": environments, "completions": completions, **columns})
    return [len(environment._asked) for environment in environments]


seen = []
ROWS = [
    {"prompt": [{"role": "user", "content": "Price of: "}], "goods": ["apple", "bread"]},
    {"prompt": [{"role": "user", "content": "Nothing."}], "goods": []},
]
