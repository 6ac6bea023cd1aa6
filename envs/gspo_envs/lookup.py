"""Follow a chain of links through a table, one lookup a turn."""

from __future__ import annotations

from gspo_env.env.base import Options, ResetResult, extract_tag
from gspo_env.env.tools import ToolCall, format_tool_call, tool
from gspo_env.errors import ConfigError
from gspo_envs.answer import AnswerEnv

_WORDS = """
amber apple beach bird black boat book bread chair cloud corn door field fire
fish glass gold grass green hand horse house lake lamp leaf light moon night
ocean paper plant rain river road salt sand ship snow stone table tree water
wind wood
"""
WORDS = tuple(_WORDS.split())


class LookupEnv(AnswerEnv):
    """Follow a chain of links with a lookup tool, then answer with the last word.

    Each right hop, in order, gives 0.2 once; the right answer gives 1.0.

    Args:
        hops: Fewest and most links of an episode, inclusive; `reset(options={"hops": 3})` fixes it.
        entries: How many words the table links.
        early_answer: Probability that the noisy demonstrator answers one hop early.
    """

    blocking = False
    system_prompt = (
        "Follow the links with the lookup tool, one call per turn. Each call returns the next "
        "word. After the last link, answer with <answer>word</answer>."
    )

    def __init__(
        self,
        hops: tuple[int, int] = (2, 4),
        entries: int = 24,
        early_answer: float = 0.6,
    ) -> None:
        """Set the range of episodes."""
        low, high = hops
        if not 1 <= low <= high < entries <= len(WORDS):
            raise ConfigError(
                f"Lookup: hops is {hops} and entries {entries}, "
                f"expected 1 <= hops < entries <= {len(WORDS)}."
            )
        self.hops, self.entries, self.early_answer = (low, high), entries, early_answer
        self.max_turns = high + 4
        self._links: dict[str, str] = {}
        self._chain: list[str] = []
        self._progress = 0

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Draw a new table and a new chain.

        Raises:
            ConfigError: `options["hops"]` does not fit the table.
        """
        super().reset(seed=seed, options=options)
        low, high = self.hops
        hops = (options or {}).get("hops")
        if hops is None:
            hops = int(self.np_random.integers(low, high + 1))
        if isinstance(hops, bool) or not isinstance(hops, int) or not 1 <= hops < self.entries:
            raise ConfigError(f"Lookup: hops is {hops!r}, expected 1 to {self.entries - 1}.")
        # One cycle through all words: no chain meets a word twice.
        cycle = [WORDS[i] for i in self.np_random.permutation(len(WORDS))[: self.entries]]
        self._links = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
        self._chain = cycle[: hops + 1]
        self.max_turns = hops + 4
        self._progress = 0
        links = "link" if hops == 1 else "links"
        return f'Follow {hops} {links} from "{cycle[0]}".', {"state_key": self._state_key}

    @tool
    def lookup(self, key: str) -> str:
        """Look up the word that a word links to; unknown key where there is none.

        Args:
            key: The word to look up.
        """
        return self._links.get(key, "unknown key")

    def on_tool_result(self, call: ToolCall, result: str) -> float:
        """Pay for the next right hop."""
        if self._left == 0 or call.arguments["key"] != self._chain[self._progress]:
            return 0.0
        self._progress += 1
        return 0.2

    def is_right(self, text: str) -> bool:
        """Compare the answer with the end of the chain."""
        return extract_tag(text, "answer") == self._chain[-1]

    def expert_action(self, noise: float = 0.0) -> str:
        """Look up the next word or answer; with noise, answer early or slip on a word."""
        early = self._is_early(noise)
        word = self._chain[self._progress]
        answers = self._left == 0 or (self._left == 1 and early)
        if noise > 0.0 and self.np_random.random() < noise:
            others = [other for other in self._links if other != word]
            word = others[int(self.np_random.integers(len(others)))]
        return f"<answer>{word}</answer>" if answers else format_tool_call("lookup", {"key": word})

    @property
    def _left(self) -> int:
        return len(self._chain) - 1 - self._progress

    @property
    def _state_key(self) -> str:
        return f"{self._chain[self._progress]}:{self._left}"
