"""OpenEnv's servers: `gym.make("gspo/OpenEnv-v0", url="http://localhost:8000")`."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from gspo_env.env.base import ResetResult, StepResult
from gspo_env.errors import ConfigError, ToolServerError, raised_as
from gspo_env.redaction import resolve
from gspo_env.registry import load_function
from gspo_env.runtime import loops
from gspo_envs.adapters.foreign import ForeignEnv, load

logger = logging.getLogger(__name__)

_LOOP = "openenv"
_CLOSING = 15.0


class OpenEnvEnv(ForeignEnv):
    """An environment on a running OpenEnv server; each copy has its own session.

    The first reset opens the session. It is closed by `close`, or when the copy is
    garbage-collected, as after a failed episode. A step that the server refuses or does not answer
    truncates the episode; the next reset reconnects.

    Args:
        url: Address of the server.
        action: Field of the action for the policy's text, "json" if the policy writes the whole
            action, or a function (`file.py:function`) from text to a dictionary.
        observation: Field of the observation that the policy reads, by default all fields as JSON,
            or a function (`file.py:function`) from the dictionary to a text.
        system_prompt: The system prompt; the server has none.
        headers: HTTP headers for the connection; `${NAME}` is the environment variable NAME.
        timeout: Maximum seconds of one request.
        max_turns: Turns before the episode is truncated.
        reset: Additional arguments of the server's `reset`.

    Raises:
        MissingExtraError: OpenEnv is not installed.
    """

    blocking = True
    draws = False

    def __init__(
        self,
        url: str,
        *,
        action: str | Callable[[str], Mapping[str, Any]] = "message",
        observation: str | Callable[[Mapping[str, Any]], str] = "",
        system_prompt: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        max_turns: int | None = None,
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepares the client; the first reset connects."""
        super().__init__(max_turns)
        core = load("openenv.core", "OpenEnv", "openenv")
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(f"OpenEnv: url is {url!r}, expected an http or ws address.")
        self.url, self.system_prompt, self._reset = url, system_prompt, dict(reset or {})
        self._action, self._observation = _function(action), _function(observation)
        self._client = core.GenericEnvClient(
            base_url=url,
            connect_timeout_s=timeout,
            message_timeout_s=timeout,
            headers={name: resolve(value) for name, value in (headers or {}).items()},
        )
        # a session that is never closed would keep its slot
        self._forgotten = weakref.finalize(self, _free, self._client)

    def begin(self, seed: int, options: dict[str, Any]) -> ResetResult:
        """Begins an episode in this copy's session; the server's metadata may have a `task_key`.

        Raises:
            ToolServerError: The server cannot be reached, is full or refuses the session.
        """
        arguments = {"seed": seed, **self._reset, **options}
        hint = "; a full server needs a lower rollout.concurrency or more sessions"
        what = f"OpenEnv: {self.url} began no episode"
        with raised_as(ToolServerError, what, Exception, mend=hint):
            result = loops.run(self._ask("reset", **arguments), _LOOP)
        key = (result.metadata or {}).get("task_key")
        return self._read(result), {} if key is None else {"task_key": key}

    def act(self, action: str) -> StepResult:
        """Sends an action; an action that has to be JSON and is not uses up the turn."""
        try:
            payload = self._payload(action)
        except (ValueError, RecursionError) as error:
            return f"Error: the action is not valid: {error}", 0.0, False, False, {}
        result = loops.run(self._ask("step", payload), _LOOP)
        info = {"openenv": result.metadata or {}}
        if result.done or result.reward is not None:  # an end without any reward is no 0
            info["scored"] = result.reward is not None
        return self._read(result), float(result.reward or 0.0), bool(result.done), False, info

    def close(self) -> None:
        """Closes the session; a reset opens another."""
        try:
            loops.run(_close(self._client), _LOOP, timeout=_CLOSING)
        except Exception as error:  # the server frees it when the connection ends
            logger.warning("OpenEnv: %s: closing a session: %s", self.url, error)

    async def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._client, method)(*args, **kwargs)

    def _payload(self, text: str) -> Mapping[str, Any]:
        if isinstance(self._action, str) and self._action != "json":
            return {self._action: text}
        value = json.loads(text) if self._action == "json" else self._action(text)
        if not isinstance(value, dict):
            raise ValueError("expected an object")
        return value

    def _read(self, result: Any) -> str:
        observation = result.observation
        if callable(self._observation):
            return str(self._observation(observation))
        if not self._observation:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation not in observation:
            raise ConfigError(
                f"OpenEnv: the observation has no field {self._observation!r}, "
                f"it has {', '.join(observation)}."
            )
        value = observation[self._observation]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _function(value: Any) -> Any:
    return load_function(value, "function") if isinstance(value, str) and ":" in value else value


async def _close(client: Any) -> None:
    await client.close()


def _free(client: Any) -> None:
    """Closes without waiting, because the garbage collector may run in any thread."""
    loops.post(_close(client), _LOOP)
