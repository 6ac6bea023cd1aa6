"""Tools: typed Python functions that a policy calls in text."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath
from typing import Annotated, Any, NotRequired, TypeVar

from docstring_parser import ParseError, google
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict

from gspo_env.errors import ConfigError, first_line, raised_as
from gspo_env.tools.json_calls import whole_numbers

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PROSE = ("Returns", "Yields", "Raises", "Example", "Examples", "Note", "Notes")
_DOCSTRINGS = google.GoogleParser(
    [google.Section(title, "param", google.SectionType.MULTIPLE) for title in ("Args", "Arguments")]
    + [google.Section(title, "prose", google.SectionType.SINGULAR) for title in _PROSE]
)
_MARK = "__gspo_tool__"
_ANY_ARGUMENTS = TypeAdapter(dict[str, Any])
F = TypeVar("F", bound=Callable[..., Any])


def _call_elsewhere(**arguments: Any) -> str:
    raise NotImplementedError("this tool is called by the program or the process that listed it")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function that the policy may call, with the schema that the chat template lists.

    A tool that a program or another process calls has no function of its own, and takes any
    arguments.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    function: Callable[..., Any] = _call_elsewhere
    validator: TypeAdapter[dict[str, Any]] = _ANY_ARGUMENTS
    """Parses JSON to the keyword arguments of `function`; strict, without unknown names."""
    strict: bool = False
    """Whether a program is promised that the arguments of each call fit `parameters`."""

    @property
    def schema(self) -> dict[str, Any]:
        """The schema in OpenAI's function format."""
        fields = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**fields, "parameters": self.parameters}}

    def validate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the validated keyword arguments of a call.

        A number without a fraction, such as 3.0, is an integer.

        Raises:
            ConfigError: An argument is missing, unknown or of the wrong type; the message is one
                sentence.
        """
        try:
            return self.validator.validate_json(json.dumps(whole_numbers(arguments)))
        except ValidationError as error:
            raise ConfigError(_one_sentence(self.name, error)) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"wrong arguments for {self.name}: {error}.") from None


def tool(function: F) -> F:
    """Marks a typed, documented function or method as a tool; it can still be called directly.

    The docstring up to its first section is the description; `Args:` describes the parameters.
    `@staticmethod` and `@classmethod` may stand above or below it.

    Raises:
        ConfigError: It is not a function, or the docstring or an annotation is missing or cannot
            be used; of a method, this is raised when its class makes an environment.
    """
    plain = getattr(mark(function), "__func__", function)
    if not _is_method(plain):
        as_tool(plain)
    return function


def mark(function: F) -> F:
    """Marks a function as a tool, whose definition is read when it is used.

    Raises:
        ConfigError: It is not a function.
    """
    plain = getattr(function, "__func__", function)
    if not callable(plain) or not hasattr(plain, "__name__"):
        raise ConfigError(f"@tool got {function!r}, expected a function or method.")
    if not isinstance(getattr(plain, _MARK, None), _Marked):
        setattr(plain, _MARK, _Marked(plain, is_static=isinstance(function, staticmethod)))
    return function


@dataclass
class _Marked:
    """A function that `tool` has marked."""

    function: Callable[..., Any]
    is_static: bool

    @cached_property
    def tool(self) -> Tool:
        return _build_tool(self.function, is_static=self.is_static)


def _is_method(function: Callable[..., Any]) -> bool:
    return "." in function.__qualname__.rpartition("<locals>.")[2]


def place_of(function: Callable[..., Any], name: str = "") -> str:
    """Returns the name, the file and the line of a function.

    Args:
        function: The function.
        name: The name, with the class that has it; by default that of its definition.
    """
    name = name or function.__qualname__.rpartition("<locals>.")[2]
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{name} ({PurePath(code.co_filename).name}:{code.co_firstlineno})" if code else name


def as_tool(function: Callable[..., Any]) -> Tool:
    """Returns the `Tool` of a function or method decorated with `tool`.

    Raises:
        ConfigError: The function was not decorated.
    """
    definition = _definition(function)
    if definition is None:
        raise ConfigError(f"{function!r} is not a tool, decorate it with @tool.")
    return definition


def _definition(member: Any) -> Tool | None:
    """Returns the tool that a function is, or that a member of a class is made of."""
    for name in ("__func__", "fget", "func"):
        member = getattr(member, name, member)
    mark = getattr(member, _MARK, None)
    return mark.tool if isinstance(mark, _Marked) else None


def tool_methods(cls: type, instance: object = None) -> tuple[Tool, ...]:
    """Returns the methods of a class that are tools, base classes first.

    Args:
        cls: The class.
        instance: The instance of it to which the tools are bound; by default they are unbound.

    Raises:
        ConfigError: The first parameter of a method is not its instance or class, a tool is made
            into something else, or a method that is not a tool replaces one.
    """
    tools = []
    for name in dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base)):
        member, where = inspect.getattr_static(cls, name), f"{cls.__name__}.{name}"
        plain, definition = getattr(member, "__func__", member), _definition(member)
        if definition is None:
            if callable(plain) and any(_definition(vars(b).get(name)) for b in cls.__mro__):
                remedy = f"decorate it with @tool, or drop it with {name} = None."
                raise ConfigError(f"{place_of(plain, where)} replaces a tool: {remedy}")
            continue
        if getattr(plain, _MARK, None) is None:
            kind = type(member).__name__
            raise ConfigError(f"tool {where} is a {kind}, expected a method.")
        parameters = [*inspect.signature(plain).parameters]
        is_static = isinstance(member, staticmethod)
        if parameters[not is_static :] != [*definition.parameters["properties"]]:
            form = "annotate each parameter of a static method" if is_static else "add self"
            where = place_of(plain, f"{where}({', '.join(parameters)})")
            raise ConfigError(f"tool {where}: {form}.")
        bound = definition.function if instance is None else getattr(instance, name)
        tools.append(replace(definition, function=bound))
    return tuple(tools)


def format_tool_call(name: str, arguments: dict[str, Any]) -> str:
    """Formats a call as the policy would write it.

    Example:
        >>> format_tool_call("lookup", {"key": "amber"})
        '<tool_call>{"name": "lookup", "arguments": {"key": "amber"}}</tool_call>'
    """
    return (
        f"{_OPEN}{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}{_CLOSE}"
    )


def tool_call_frames(tool: Tool) -> list[str]:
    """Returns the constant text around the argument values of a call, in order of the arguments.

    Example:
        For `lookup(key: str)`:
        `['<tool_call>{"name": "lookup", "arguments": {"key": "', '"}}</tool_call>']`.
    """
    frames = []
    text = f'{_OPEN}{{"name": {json.dumps(tool.name)}, "arguments": {{'
    for index, (name, schema) in enumerate(tool.parameters["properties"].items()):
        quote = '"' if schema.get("type") == "string" else ""
        frames.append(f"{text}{', ' if index else ''}{json.dumps(name)}: {quote}")
        text = quote
    return [*frames, f"{text}}}}}{_CLOSE}"]


def _build_tool(function: Callable[..., Any], *, is_static: bool) -> Tool:
    name = function.__name__
    description, documented = _read_docstring(place_of(function), inspect.getdoc(function))
    make_type: Any = TypedDict
    arguments = make_type(f"{name}_arguments", _fields(function, documented, is_static))
    arguments.__pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    problem = f"tool {place_of(function)}: its annotations have no JSON schema"
    with raised_as(ConfigError, problem, PydanticUserError, mend=".", reason=first_line):
        validator: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)
        schema = validator.json_schema()
    for value in schema.setdefault("properties", {}).values():
        value.pop("title", None)
    schema.setdefault("required", [])
    keys = ("type", "properties", "required", "$defs")
    return Tool(
        name=name,
        description=description,
        parameters={key: schema[key] for key in keys if key in schema},
        function=function,
        validator=validator,
    )


def _fields(
    function: Callable[..., Any], documented: dict[str, str], is_static: bool
) -> dict[str, Any]:
    """Returns each parameter's annotation for the validator."""
    name = place_of(function)
    problem = f"tool {name}: an annotation cannot be resolved"
    with raised_as(ConfigError, problem, NameError, TypeError, mend=".", reason=str):
        hints = typing.get_type_hints(function, include_extras=True)
    is_method = not is_static and _is_method(function)
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if (
            index == 0
            and is_method
            and (parameter.name in ("self", "cls") or parameter.name not in hints)
        ):
            continue  # the instance or the class
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {name}: parameter {parameter} cannot be given by name.")
        if parameter.name not in hints:
            raise ConfigError(f"tool {name}: parameter {parameter.name} has no type annotation.")
        default = parameter.default
        shown: Any = {"default": default} if isinstance(default, (str, int, float, bool)) else None
        described = Field(description=documented.get(parameter.name), json_schema_extra=shown)
        annotation: Any = Annotated[hints[parameter.name], described]
        required = default is parameter.empty
        fields[parameter.name] = annotation if required else NotRequired[annotation]
    unknown, undescribed = sorted({*documented} - {*fields}), sorted({*fields} - {*documented})
    if unknown and undescribed:  # a slip of the pen, or a parameter that was renamed
        wrong = f"its docstring describes {unknown[0]!r}, which is not a parameter"
        raise ConfigError(f"tool {name}: {wrong}; expected one of {', '.join(undescribed)}.")
    return fields


def _read_docstring(name: str, docstring: str | None) -> tuple[str, dict[str, str]]:
    """Splits a Google docstring into its description and the parameters' descriptions."""
    problem = f"tool {name}: its docstring cannot be read"
    with raised_as(ConfigError, problem, ParseError, reason=str):
        parsed = _DOCSTRINGS.parse(docstring)
    description = (parsed.description or "").strip()
    if not description:
        raise ConfigError(f"tool {name} has no docstring; its first lines tell the policy its use.")
    texts = {entry.arg_name: entry.description or "" for entry in parsed.params}
    return description, {name: " ".join(text.split()) for name, text in texts.items()}


def _one_sentence(name: str, error: ValidationError) -> str:
    parts = []
    for item in error.errors(include_url=False, include_input=False, include_context=False):
        where = ".".join(str(part) for part in item["loc"]) or "arguments"
        parts.append(f"{where}: {item['msg']}")
    return f"wrong arguments for {name}: {'; '.join(parts)}."
