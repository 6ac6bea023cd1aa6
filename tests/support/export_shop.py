"""An environment of a file: tools with several kinds of arguments, and rewards of turns."""

from typing import Literal

from gspo_env import ToolEnv
from gspo_env.env import extract_tag
from gspo_env.tools.tool import format_tool_call, tool

PRICES = {"apple": 3, "bread": 5, "cheese": 9}


class Shop(ToolEnv):
    """Compute what two goods cost together."""

    blocking = False
    system_prompt = "Look up prices with the tool, then answer with <answer>number</answer>."
    max_calls_per_turn = 2

    def __init__(self, most: int = 9):
        super().__init__(most)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.goods = self.np_random.permutation(sorted(PRICES))[:2].tolist()
        self.lookups = 0
        return "What do {} and {} cost together?".format(*self.goods), {"solution": "secret"}

    @tool
    def price(self, good: Literal["apple", "bread", "cheese"], times: int = 1) -> str:
        """Look up a price.

        Args:
            good: The good.
            times: How many of it.
        """
        self.lookups += 1
        return str(PRICES[good] * times)

    def on_tool_result(self, call, result):
        return 0.25

    def on_final(self, text):
        correct = extract_tag(text, "answer") == str(sum(PRICES[good] for good in self.goods))
        return "", float(correct), True

    def step_info(self, terminated, truncated):
        return {"reward_parts": {"lookups": float(self.lookups)}} if terminated else {}

    def expert_action(self, noise=0.0):
        if self.lookups < 2:
            return format_tool_call("price", {"good": self.goods[self.lookups]})
        return f"<answer>{sum(PRICES[good] for good in self.goods)}</answer>"
