"""Train language models on text environments with many turns, by GSPO.

Importing this package registers its environments with Gymnasium and loads no heavy library.
"""

from gspo_env.env.base import TextEnv
from gspo_env.env.registration import describe_envs, make_env, register_builtin, resolve_env
from gspo_env.env.spaces import UnicodeText
from gspo_env.env.tool_env import ToolEnv
from gspo_env.env.tools import Tool, ToolCall, ToolCallError, format_tool_call, tool
from gspo_env.errors import (
    BatchError,
    ChatTemplateError,
    ConfigError,
    EngineError,
    EnvironmentCheckError,
    EnvironmentContractError,
    GspoEnvError,
    MissingExtraError,
    ModelError,
    OutputError,
    RolloutError,
    UnknownEnvironmentError,
)
from gspo_env.types import Episode, Group, StopReason, Task, Timing, Turn

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "ChatTemplateError",
    "ConfigError",
    "EngineError",
    "EnvironmentCheckError",
    "EnvironmentContractError",
    "Episode",
    "Group",
    "GspoEnvError",
    "MissingExtraError",
    "ModelError",
    "OutputError",
    "RolloutError",
    "StopReason",
    "Task",
    "TextEnv",
    "Timing",
    "Tool",
    "ToolCall",
    "ToolCallError",
    "ToolEnv",
    "Turn",
    "UnicodeText",
    "UnknownEnvironmentError",
    "describe_envs",
    "format_tool_call",
    "make_env",
    "register_builtin",
    "resolve_env",
    "tool",
]

register_builtin()
