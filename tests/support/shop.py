"""A shop with tools, and the calls of an action that it makes."""

from gspo_env import ToolEnv
from gspo_env.tools.tool import tool
from gspo_env.types import Message


class Shop(ToolEnv):
    """Takes many calls and notes those that it makes."""

    max_calls_per_turn = max_turns = 99

    def __init__(self):
        super().__init__()
        self.made = []

    @tool
    def look(self, word: str, times: int = 1) -> str:
        """Look a word up."""
        return word * times

    @tool
    def search(self, query: str) -> str:
        """Search a text."""
        return query

    @tool
    def leave(self) -> str:
        """Leave the shop."""
        return "bye"

    def on_final(self, text):
        return "final", 0.0, False

    def on_tool_result(self, call, result):
        self.made.append(call)
        return 1.0


def step(action):
    """The observation of an action, its `info`, and the calls that the shop has made."""
    shop = Shop()
    shop.reset(seed=0)
    observation, *_, info = shop.step(action)
    return observation, info, shop.made


def calls_in_tool_env(action):
    """The calls that are made, and the number of malformed ones."""
    _, info, made = step(action)
    return made, info.get("malformed_calls", 0)


def as_text(text, malformed=0, **fields):
    """What is read of a text without calls."""
    return Message(role="assistant", content=text, **fields), malformed


TOOLS = Shop().tools
