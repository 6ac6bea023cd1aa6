"""Errors: each message has the problem, the value, what is allowed and how to fix it."""


class GspoEnvError(Exception):
    """Base class of all errors of gspo_env."""


class ConfigError(GspoEnvError, ValueError):
    """A configuration value is invalid or unknown."""


class EnvironmentContractError(GspoEnvError, ValueError):
    """An environment broke the contract of `TextEnv`."""


class EnvironmentCheckError(EnvironmentContractError):
    """`gspo_env.check.environment.check_env` found a fault."""


class UnknownEnvironmentError(GspoEnvError, ValueError):
    """No environment has the given id."""


class BatchError(GspoEnvError, ValueError):
    """Tensors passed to an objective or the learner do not fit together."""


class ChatTemplateError(GspoEnvError, ValueError):
    """A tokenizer's chat template is missing or cannot give a token-exact transcript."""


class EngineError(GspoEnvError, RuntimeError):
    """An engine could not serve a request."""


class RolloutError(GspoEnvError, RuntimeError):
    """Too many episodes failed in their environment, or there is no task to train on."""


class SandboxUnavailableError(GspoEnvError, RuntimeError):
    """This machine cannot isolate untrusted code; the message says what is missing."""


class TrainingError(GspoEnvError, RuntimeError):
    """Training cannot go on: nothing can be learned, or gradients were not finite."""


class ModelError(GspoEnvError, ValueError):
    """A model or its tokenizer cannot be loaded."""


class OutputError(GspoEnvError, ValueError):
    """A folder for results cannot be written."""


class MissingExtraError(GspoEnvError, RuntimeError):
    """An optional dependency is not installed; the message contains the install command."""


class ToolServerError(GspoEnvError, RuntimeError):
    """A tool server failed, exited or did not answer; the policy reads the message."""


class TrackingError(GspoEnvError, RuntimeError):
    """A tracker could not record everything; raised by its `finish`."""

    def __init__(self, calls: list[str]) -> None:
        """Stores the errors of the failed calls."""
        super().__init__(f"{len(calls)} calls failed, the first was {calls[0]}")
        self.calls = calls
