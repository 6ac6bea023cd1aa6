"""Errors: each message has the problem, the value, what is allowed and how to fix it."""

from __future__ import annotations

from collections.abc import Callable

DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading raises if a file holds something else than was written."""


class GspoEnvError(Exception):
    """Base class of all errors of gspo_env."""


class ConfigError(GspoEnvError, ValueError):
    """A configuration value is invalid or unknown; each argument is one fault."""

    def __str__(self) -> str:
        """Returns all faults as one sentence."""
        return "; ".join(map(str, self.args))


class EnvironmentContractError(GspoEnvError, ValueError):
    """An environment broke the contract of `TextEnv`."""


class EnvironmentCheckError(EnvironmentContractError):
    """`gspo_env.check.environment.check_env` found a fault."""


class ForeignError(GspoEnvError, RuntimeError):
    """What environment code raised, as text: it raised in another process, or what would end ours.

    Attributes:
        name: The class of the exception.
        text: Its message.
        where: The file and the line.
        trace: The traceback.
    """

    def __init__(self, name: str, text: str, where: str, trace: str) -> None:
        """Stores the parts."""
        super().__init__(f"{name}: {text}")
        self.name, self.text, self.where, self.trace = name, text, where, trace


class EnvironmentCrashError(GspoEnvError, RuntimeError):
    """The process of an environment ended, or sent what cannot be read."""


class EnvironmentHangError(GspoEnvError, RuntimeError):
    """An environment did not return in time."""


class UnknownEnvironmentError(GspoEnvError, ValueError):
    """No environment has the given id."""


class BatchError(GspoEnvError, ValueError):
    """Tensors passed to an objective or the learner do not fit together."""


class ChatTemplateError(GspoEnvError, ValueError):
    """A tokenizer's chat template is missing or cannot give a token-exact transcript."""


class TemplateBoundsError(ChatTemplateError):
    """A chat template takes too much time or memory, or cannot be parsed: it renders nothing."""


class RefusedError(GspoEnvError, ValueError):
    """A request or a conversation that is refused.

    Attributes:
        status: The HTTP status of a request.
        code: A short name of the reason, such as `context_length_exceeded`.
        param: The field of the request that is at fault.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        """Stores the parts."""
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class PromptLengthError(ChatTemplateError):
    """A prompt and its answer are longer than the context.

    Attributes:
        tokens: Tokens of the prompt; at least so many if no answer is given.
    """

    def __init__(self, context: int, tokens: int, answer: int | None = None) -> None:
        """Stores the number of the prompt's tokens."""
        parts = f"{tokens} in the prompt, {answer} for the answer"
        if answer is None:
            parts = f"at least {tokens} in the prompt"
        super().__init__(
            f"prompt is too long: the maximum context length is {context} tokens; {parts}; shorten "
            "the conversation, or ask for fewer tokens"
        )
        self.tokens = tokens


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
    """A tracker cannot record now."""


def reason_of(error: BaseException) -> str:
    """Returns the message of an error, on one line, with its type where it alone says little.

    Example:
        >>> reason_of(OSError(2, "No such file")), reason_of(KeyError("step"))
        ('No such file', "KeyError: 'step'")
    """
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    is_sentence = text and isinstance(error, (OSError, ValueError, GspoEnvError))
    return text if is_sentence else f"{type(error).__name__}: {text}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0][:500]
    return f"{type(error).__name__}: {line}" if isinstance(error, LookupError) else line


class raised_as:
    """A context in which errors become one of ours: `problem: reason`, and what to do.

    Our own errors travel as they are, unless one is named as a cause.

    Args:
        kind: The error that is raised instead.
        problem: What went wrong.
        causes: The errors that become it.
        mend: The end of the sentence, behind the reason.
        reason: Returns the reason.

    Example:
        >>> with raised_as(OutputError, "cannot read 'x'", OSError, mend="; name another one"):
        ...     open("/nowhere/x")
        Traceback (most recent call last):
        gspo_env.errors.OutputError: cannot read 'x': No such file or directory; name another one
    """

    def __init__(
        self,
        kind: type[Exception],
        problem: str,
        *causes: type[BaseException],
        mend: str = "",
        reason: Callable[[BaseException], str] = reason_of,
    ) -> None:
        self._kind, self._problem, self._causes = kind, problem, causes
        self._mend, self._reason = mend, reason

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises the error in place of a cause."""
        named = [cause for cause in self._causes if isinstance(error, cause)]
        if isinstance(error, GspoEnvError):
            named = [cause for cause in named if issubclass(cause, GspoEnvError)]
        if error is not None and named:
            text = f"{self._problem}: {self._reason(error)}{self._mend}"
            raise self._kind(text) from error


def above(value: float, bound: float) -> str:
    """Returns a value with as many digits, at least two, as show that it is above its bound."""
    texts = (f"{value:.{digits}g}" for digits in range(2, 18))
    return next((text for text in texts if not float(text) <= float(f"{bound:g}")), f"{value:g}")


def figure(value: float, form: str = ".3g") -> str:
    """Formats a number; one that only rounding parts from 0, such as -0.0 or 1.39e-17, is 0.

    Example:
        >>> figure(0.1 + 0.2 - 0.3), figure(-0.0, "+.4g"), figure(-1e-17, ".3f"), figure(1e-6)
        ('0', '+0', '0.000', '1e-06')
    """
    return format(0.0 if abs(value) < 1e-12 else value, form)
