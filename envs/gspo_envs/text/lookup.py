"""Follow a chain of links through a table, one lookup a turn."""

from __future__ import annotations

from typing import Any

from gspo_env.errors import ConfigError
from gspo_env.seeding import fingerprint
from gspo_env.tools.tool import format_tool_call, tool
from gspo_env.types import ToolCall
from gspo_envs.text.answer import ChainEnv, read_range

_WORDS = """
amber apple beach bird black boat book bread chair cloud corn door field fire
fish glass gold grass green hand horse house lake lamp leaf light moon night
ocean paper plant rain river road salt sand ship snow stone table tree water
wind wood
"""
WORDS = tuple(_WORDS.split())


class LookupEnv(ChainEnv):
    """Follow a chain of links with a lookup tool, then answer with the last word.

    Each right hop, in order, earns 0.2 once; the right answer earns 1.0.

    Args:
        hops: Links of an episode, or their minimum and maximum, inclusive;
            `reset(options={"hops": 3})` fixes it.
        entries: Number of words in the table.
        early_answer: Probability that the noisy demonstrator answers one hop early.
    """

    length_option = "hops"
    system_prompt = (
        "Follow the links with the lookup tool, one call per turn. Each call returns the next "
        "word. After the last link, answer with <answer>word</answer>."
    )

    def __init__(
        self, hops: int | tuple[int, int] = (2, 4), entries: int = 24, early_answer: float = 0.6
    ) -> None:
        """Sets the range of the number of hops."""
        low, high = read_range("Lookup: hops", hops)
        if not 1 <= low <= high < entries <= len(WORDS):
            raise ConfigError(
                f"Lookup: hops is {hops} and entries {entries}, "
                f"expected 1 <= hops < entries <= {len(WORDS)}."
            )
        super().__init__((low, high), entries - 1, early_answer)
        self.entries = entries
        self._links: dict[str, str] = {}

    def draw(self, options: dict[str, Any]) -> str:
        """Draws a new table and a new chain."""
        hops = self.draw_length(options)
        # One cycle through all words, so no chain has a word twice.
        drawn = self.np_random.permutation(len(WORDS))[: self.entries].tolist()
        cycle = [WORDS[i] for i in drawn]
        self._links = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
        self._values = cycle[: hops + 1]
        return f'Follow {hops} {"link" if hops == 1 else "links"} from "{cycle[0]}".'

    @property
    def _task_key(self) -> str:
        return fingerprint(self._remaining, *self._links)

    @tool
    def lookup(self, key: str) -> str:
        """Look up the word that a word links to; unknown key where there is none.

        Args:
            key: The word to look up.
        """
        return self._links.get(key, "unknown key")

    def on_tool_result(self, call: ToolCall, result: str) -> float:
        """Rewards the next right hop."""
        if self._remaining == 0 or call.arguments["key"] != self._values[self._progress]:
            return 0.0
        return self._advance()

    def expert_action(self, noise: float = 0.0) -> str:
        """Returns the next lookup or the answer; with noise, early or with a wrong word."""
        early = self._is_early(noise)
        word = self._values[self._progress]
        answers = self._remaining == 0 or (self._remaining == 1 and early)
        if noise > 0.0 and self.np_random.random() < noise:
            others = [other for other in self._links if other != word]
            word = others[int(self.np_random.integers(len(others)))]
        return f"<answer>{word}</answer>" if answers else format_tool_call("lookup", {"key": word})
