"""Environments as OpenEnv servers, and the client.

A package's server is `make_app(environment_class("gspo/Story-v0"), "story")`. The first
observation's metadata has the conversation and the tools, the later ones what the `info` of the
step asks of the trainer.
"""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any, ClassVar

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.types import EnvironmentMetadata

from gspo_env.chat.messages import write_message
from gspo_env.export.stepper import Stepper, conversation, record
from gspo_env.rollout.play import PolicyInput
from gspo_env.types import ResetInfo, StepInfo

_HIDDEN = ("extra", "state_key", "task_key")
"""Keys that may hold the solution: a client may show the policy all metadata."""


class TextAction(Action):  # type: ignore[misc]
    """What the policy writes, tool calls included."""

    message: str


class TextObservation(Observation):  # type: ignore[misc]
    """What the policy reads next."""

    text: str


class ServedEnvironment(Environment):  # type: ignore[misc]
    """An environment behind OpenEnv's server; each session has its own."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    env: ClassVar[str | type]
    env_kwargs: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        """Makes the environment."""
        super().__init__()
        self._stepper = Stepper(self.env, **self.env_kwargs)
        self._state = State(episode_id="", step_count=0)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> TextObservation:
        """Begins an episode; the metadata has its `messages` and `tools`."""
        seed = uuid.uuid4().int >> 100 if seed is None else seed
        self._state = State(episode_id=episode_id or uuid.uuid4().hex, step_count=0)
        return _observation(self._stepper.reset(seed, **options))

    def step(
        self, action: TextAction, timeout_s: float | None = None, **kwargs: Any
    ) -> TextObservation:
        """Takes an action; the last observation's metadata has the record of the episode.

        Raises:
            EnvironmentContractError: The environment failed, or no episode is running.
        """
        now = self._stepper.step(action.message)
        self._state.step_count += 1
        if now is not None:
            return _observation(now)
        episode = self._stepper.episode
        assert episode is not None
        last = episode.turns[-1]
        metadata = {**_info(last.info), "episode": record(episode)}
        text = self._stepper.observation
        return TextObservation(text=text, done=True, reward=last.reward, metadata=metadata)

    @property
    def state(self) -> State:
        """The number of steps of the episode."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Returns the name and the summary of the environment."""
        about = (type(self._stepper.env.unwrapped).__doc__ or "").strip().partition("\n")[0]
        return EnvironmentMetadata(
            name=self._stepper.env_id, description=about or "A text environment.", version="0.1.0"
        )

    def close(self) -> None:
        """Closes the environment."""
        self._stepper.close()


class TextEnvClient(EnvClient[TextAction, TextObservation, State]):  # type: ignore[misc]
    """The client of such a server."""

    def _step_payload(self, action: TextAction) -> dict[str, Any]:
        return {"message": action.message}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[TextObservation]:
        metadata = payload.get("metadata") or {}
        observation = TextObservation(
            text=payload["observation"]["text"],
            done=payload.get("done", False),
            reward=payload.get("reward"),
            metadata=metadata,
        )
        return StepResult(
            observation=observation,
            reward=observation.reward,
            done=observation.done,
            metadata=metadata,
        )

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


def environment_class(env: str | type, **env_kwargs: Any) -> type[ServedEnvironment]:
    """Returns the class that a server serves.

    Args:
        env: A registered id, `FILE.py:CLASS`, `MODULE:CLASS` or a class.
        env_kwargs: Arguments of the environment.
    """
    return type("Served", (ServedEnvironment,), {"env": env, "env_kwargs": env_kwargs})


def make_app(kind: type[ServedEnvironment], name: str, sessions: int = 64) -> Any:
    """Returns the application of a server with so many sessions at once."""
    return create_app(
        kind, TextAction, TextObservation, env_name=name, max_concurrent_envs=sessions
    )


def _observation(now: PolicyInput) -> TextObservation:
    metadata = _info(now.info)
    if now.turn == 0:
        tools = now.prompt.tools if now.info.tools is None else now.info.tools
        messages = [write_message(message) for message in conversation(now)]
        metadata |= {"messages": messages, "tools": [tool.schema for tool in tools]}
    reward = now.reward if now.turn else None
    return TextObservation(text=now.observation, done=False, reward=reward, metadata=metadata)


def _info(info: ResetInfo | StepInfo) -> dict[str, Any]:
    """Returns what an `info` asks of the trainer, as JSON, without `_HIDDEN`."""
    written = {}
    for field in dataclasses.fields(info):
        value = getattr(info, field.name)
        if field.name in _HIDDEN or not value:
            continue
        if field.name == "messages":
            value = [write_message(message) for message in value]
        elif field.name == "tools":
            value = [tool.schema for tool in value]
        written[field.name] = value
    return written
