"""Four forms of one agent, and the native environment that plays the same episodes.

It is `gspo/Lookup-v0` over the rows of the programs and does what they do: it pays its rewards at
the last turn, and a call that cannot be parsed ends the episode, as the agents return it as text.
"""

from pathlib import Path
from typing import Any

from gspo_env.env.base import Options, ResetResult, StepResult
from gspo_env.types import Episode
from gspo_envs.data.rows import TaskRows, begin_chat
from gspo_envs.text.lookup import LookupEnv

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
FORMS: dict[str, dict[str, Any]] = {
    "openai": {"program": f"{EXAMPLES / 'lookup_openai.py'}:run"},
    "node": {"command": ["node", str(EXAMPLES / "lookup.js")]},
    "openai-agents": {"program": f"{EXAMPLES / 'lookup_openai_agents.py'}:run"},
    "langgraph": {"program": f"{EXAMPLES / 'lookup_langgraph.py'}:run"},
}
MAX_TURNS = 8
LIMITS = {"max_turn_tokens": 32, "max_context": 512}


class Native(LookupEnv):
    """The native look-up environment over the rows of the programs."""

    gives_outcome = False

    def __init__(self, data: str) -> None:
        """Opens the rows."""
        super().__init__()
        self.max_turns = MAX_TURNS
        self._rows = TaskRows(data)

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Begins the task that `gspo/Program-v0` has at this seed."""
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | begin_chat([{"role": "user", "content": ""}], *self._row)[1]

    def draw(self, options: dict[str, Any]) -> str:
        """Picks the row."""
        row, index = self._rows.pick(self.np_random, self.np_random_seed, options.get("row"))
        question: str = row["question"]
        self._row, self._links, self._progress = (index, row), row["links"], 0
        self._values = [question.split('"')[1], *row["path"]]
        return question

    def step(self, action: str) -> StepResult:
        """Keeps rewards back until the end."""
        observation, reward, terminated, truncated, info = super().step(action)
        if info.get("malformed_calls"):
            terminated, truncated, self._ended = True, False, True
            info["success"] = False
        self._kept = reward + (self._kept if self.turns_played > 1 else 0.0)
        reward = self._kept if terminated or truncated else 0.0
        return observation, reward, terminated, truncated, info


def ids(episode: Episode) -> list[tuple[Any, ...]]:
    return [(turn.prompt_ids, turn.action_ids) for turn in episode.turns]
