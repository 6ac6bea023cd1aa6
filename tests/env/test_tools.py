"""Tools: the decorator and `ToolEnv`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
from ast import literal_eval
from typing import Any, Literal, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_env import Tools

from gspo_env.env.isolated import IsolatedEnv
from gspo_env.env.tool_env import ToolEnv
from gspo_env.errors import ConfigError, EnvironmentContractError
from gspo_env.tools.schema import arguments_validator
from gspo_env.tools.tool import Tool, as_tool, format_tool_call, tool, tool_call_frames
from gspo_env.types import ToolCall


class ShopEnv(ToolEnv):
    """A shop."""

    error_reward = -0.5
    max_turns = 5

    @tool
    def price(self, item: str, count: int = 1) -> float:
        """Give the price.

        All prices are in euros.

        Args:
            item: What to buy.
            count: How many,
                at least one.

        Returns:
            The price.
        """
        return 2.5 * count

    @tool
    def fail(self) -> str:
        """Always fail."""
        raise RuntimeError("out of stock")

    @tool
    def leave(self) -> str:
        """Leave the shop."""
        self.end_episode()
        return "bye"

    @tool
    def echo(self, text: str) -> str:
        """Say it again."""
        return text

    def on_tool_result(self, call: ToolCall, result: str) -> float:
        return 0.25

    def on_final(self, text: str) -> tuple[str, float, bool]:
        return "done", 1.0, True


@tool
def scale(x: float, unit: Literal["m", "km"], label: str) -> str:
    """Scale a length."""
    return f"{x}{unit}{label}"


@pytest.fixture
def shop() -> ShopEnv:
    env = ShopEnv()
    env.reset(seed=1)
    return env


def test_schema_is_the_openai_form_with_documented_parameters():
    schema = as_tool(ShopEnv.price).schema
    assert schema == {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Give the price.\n\nAll prices are in euros.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "description": "What to buy."},
                    "count": {
                        "type": "integer",
                        "description": "How many, at least one.",
                        "default": 1,
                    },
                },
                "required": ["item"],
            },
        },
    }
    json.dumps(schema)


def test_a_decorated_function_stays_callable():
    assert scale(1.0, "m", "!") == "1.0m!"
    assert isinstance(as_tool(scale), Tool)
    with pytest.raises(ConfigError, match="decorate it with @tool"):
        as_tool(print)


def _undocumented(key: str) -> str:
    return key


def _untyped(key) -> str:  # type: ignore[no-untyped-def]
    """Look up."""
    return str(key)


def _variadic(*keys: str) -> str:
    """Look up."""
    return "".join(keys)


def _misdescribed(key: str) -> str:
    """Look up.

    Args:
        key without a colon
    """
    return key


def _misspelt(key: str, count: int = 1) -> str:
    """Look up.

    Args:
        count: How often.
        kye: What to look up.
    """
    return key * count


def _unresolved(key: Missing) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Look up."""
    return str(key)


@pytest.mark.parametrize("final", [("", 1.0, True, {"success": True}), ("", 1.0), None])
def test_a_final_answer_of_another_form_is_named_with_the_hook_for_info(final):
    class Wrong(ShopEnv):
        def on_final(self, text: str) -> Any:
            return final

    env = Wrong()
    env.reset(seed=0)
    with pytest.raises(EnvironmentContractError, match=r"Wrong: on_final\(\) .*step_info\(\)"):
        env.step("done")


@pytest.mark.parametrize(
    ("hook", "action"),
    [("on_tool_result", format_tool_call("echo", {"text": "a"})), ("on_tool_error", "<tool_call>")],
)
def test_a_hook_that_returns_no_reward_is_named(hook, action):
    env = type("Unpaid", (ShopEnv,), {hook: lambda self, *about: None})()
    env.reset(seed=0)
    with pytest.raises(EnvironmentContractError, match=rf"Unpaid: {hook}\(\) returned None, "):
        env.step(action)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_undocumented, "has no docstring"),
        (_untyped, "parameter key has no type annotation"),
        (_variadic, "cannot be given by name"),
        (_unresolved, "cannot be resolved"),
        (_misspelt, "docstring describes 'kye', which is not a parameter; expected one of key"),
        (_misdescribed, "docstring cannot be read: Expected a colon"),
    ],
)
def test_an_unusable_function_fails_at_decoration(function, message):
    with pytest.raises(ConfigError, match=message):
        tool(function)


def test_frames_and_values_make_up_the_formatted_call():
    echo, price, fail = (as_tool(f) for f in (ShopEnv.echo, ShopEnv.price, ShopEnv.fail))
    assert tool_call_frames(echo) == [
        '<tool_call>{"name": "echo", "arguments": {"text": "',
        '"}}</tool_call>',
    ]
    first, second, last = tool_call_frames(price)
    expected = format_tool_call("price", {"item": "tea", "count": 3})
    assert f"{first}tea{second}3{last}" == expected
    assert tool_call_frames(fail) == [format_tool_call("fail", {})]


def test_integers_pass_for_floats_and_strict_types_hold():
    subject = as_tool(scale)
    assert subject.validate({"x": 2, "unit": "m", "label": ""})["x"] == 2.0
    for wrong in ({"x": "2"}, {"unit": "cm"}, {"label": 3}, {"more": 1}, {"x": None}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            subject.validate({"x": 2, "unit": "m", "label": ""} | wrong)


def test_a_result_is_observed_and_paid(shop):
    step = shop.step(format_tool_call("price", {"item": "tea", "count": 2}))
    assert step == ("5.0", 0.25, False, False, {"observation_role": "tool"})


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (format_tool_call("prize", {}), "Error: unknown tool 'prize', tools are: price."),
        (format_tool_call("price", {}), "wrong arguments for price: item: Field required."),
        (format_tool_call("price", {"item": "a", "count": "3"}), "count: Input should be"),
        (format_tool_call("leave", {}) * 2, "Error: 2 tool calls in one turn, at most 1"),
        (format_tool_call("fail", {}), "Error: fail failed: RuntimeError: out of stock"),
    ],
)
def test_each_failed_call_is_an_observation(shop, action, message):
    observation, reward, terminated, truncated, info = shop.step(action)
    assert message in observation
    assert (reward, terminated, truncated) == (-0.5, False, False)
    assert info == {"observation_role": "tool", "tool_errors": 1}


def test_several_calls_are_answered_in_order_where_allowed(shop):
    shop.max_calls_per_turn = 3
    action = format_tool_call("echo", {"text": "a"}) + format_tool_call("fail", {})
    observation, reward, _, _, info = shop.step(action + format_tool_call("echo", {"text": "b"}))
    assert observation.split("\n")[::2] == ["a", "b"]
    assert reward == 0.0
    assert info["tool_errors"] == 1


def test_a_tool_may_end_the_episode(shop):
    assert shop.step(format_tool_call("leave", {}))[:4] == ("bye", 0.25, True, False)
    with pytest.raises(EnvironmentContractError, match="reset"):
        shop.step("again")


def test_a_final_answer_ends_and_reset_begins_anew(shop):
    assert shop.step("I am done") == ("done", 1.0, True, False, {})
    shop.reset()
    assert not shop.step(format_tool_call("echo", {"text": "x"}))[2]


@given(
    st.text()
    | st.builds(
        format_tool_call,
        st.sampled_from(["price", "echo"]),
        st.dictionaries(st.sampled_from(["item", "count", "text"]), st.text() | st.integers()),
    )
)
def test_no_action_makes_step_raise(action):
    env = ShopEnv()
    env.reset(seed=0)
    observation, reward, *_ = env.step(action)
    observation.encode()
    assert math.isfinite(reward)


def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: The number.
    """
    return 2 * number


class Doubles:
    """Has a method with the name of the function."""

    @tool
    def double(self, number: int) -> int:
        """Doubles a number."""
        return 2 * number


ONE_RULE = [
    (int, "3.0", 3),
    (int, "3e2", 300),
    (int, "-0.0", 0),
    (int, "1e25", int(1e25)),
    (int, "1e308", int(1e308)),
    (int, "3.5", None),
    (int, "true", None),
    (int, '"3"', None),
    (int, "1e400", None),
    (int, "null", None),
    (float, "3", 3.0),
    (float, "3.0", 3.0),
    (float, "1e308", 1e308),
    (float, "1e-400", 0.0),
    (float, "true", None),
    (Literal[1, 3], "3.0", 3),
    (Literal[1, 3], "2.0", None),
    (int | None, "3.0", 3),
    (list[int], "[1.0, 2, 3e0]", [1, 2, 3]),
    (list[int], "[1.5]", None),
    (dict[str, int], '{"a": 3.0}', {"a": 3}),
    (dict[str, list[int]], '{"a": [3.0, 4.5]}', None),
]


@pytest.mark.parametrize(("annotation", "text", "value"), ONE_RULE)
@pytest.mark.parametrize("name", ["native", pytest.param("server", marks=pytest.mark.adapters)])
def test_a_number_without_a_fraction_is_an_integer_wherever_it_comes_from(
    annotation, text, value, name
):
    def native(x: Any) -> str:
        """Take a value."""
        return repr(x)

    native.__annotations__["x"] = annotation
    parameters = as_tool(tool(native)).parameters
    if name == "server":  # whose schema is checked by jsonschema
        described: Any = Tool(
            name=name,
            description="",
            parameters=parameters,
            function=native,
            validator=arguments_validator(parameters),
        )
    else:
        described = native

    class Takes(Tools):
        tools = (described,)

    for action in (
        f'<tool_call>{{"name": "{name}", "arguments": {{"x": {text}}}}}</tool_call>',
        f"<function={name}>\n<parameter=x>\n{text}\n</parameter>\n</function>",
    ):
        env = Takes()
        env.reset(seed=0)
        observation, *_, info = env.step(action)
        if value is None:
            assert (observation[:6], info["tool_errors"]) == ("Error:", 1)
        else:
            assert literal_eval(observation) == value
            assert annotation is float or observation == repr(value)


class Listed(Tools):
    """Functions, decorated or not, and a method."""

    tools = [double]  # noqa: RUF012

    @tool
    def half(self, number: int) -> float:
        """Halves a number.

        Args:
            number: The number.
        """
        return number / 2


class Inherited(Listed):
    """Has the tools of its base class."""


class Replaced(Listed):
    """Has other functions, in a tuple, one of them a `Tool`."""

    tools = (as_tool(tool(double)),)


@pytest.mark.parametrize("kind", [Listed, Inherited, Replaced])
def test_functions_in_tools_are_tools_beside_the_methods(kind):
    env = kind()
    assert [each.name for each in kind.declared_tools()] == ["half", "double"]
    assert [each.name for each in env.tools] == ["half", "double"]
    for name, result in (("double", "14"), ("half", "3.5")):
        env.reset(seed=0)
        assert env.step(format_tool_call(name, {"number": 7}))[0] == result


class Bound(Tools):
    """Static and class methods in both orders, and a method that does not say `self`."""

    max_turns = 9

    @tool
    @staticmethod
    def above(number: int) -> int:
        """Doubles a number."""
        return 2 * number

    @staticmethod
    @tool
    def below(number: int) -> int:
        """Doubles a number."""
        return 2 * number

    @tool
    @classmethod
    def class_above(cls, number: int) -> str:
        """Doubles a number and names the class."""
        return f"{2 * number} {cls.__name__}"

    @classmethod
    @tool
    def class_below(cls, number: int) -> str:
        """Doubles a number and names the class."""
        return f"{2 * number} {cls.__name__}"

    @tool
    def method(this, number: int) -> str:
        """Doubles a number and names the class."""
        return f"{2 * number} {type(this).__name__}"

    @tool
    def annotated(self: Self, number: int) -> str:
        """Doubles a number and names the class."""
        return f"{2 * number} {type(self).__name__}"


class BoundToo(Bound):
    """Inherits them."""


@pytest.mark.parametrize("kind", [Bound, BoundToo])
def test_static_and_class_methods_are_tools_in_each_order_of_the_decorators(kind):
    env = kind()
    env.reset(seed=0)
    named = ["above", "below", "class_above", "class_below", "method", "annotated"]
    assert [each.name for each in env.tools] == named
    assert [each.name for each in kind.declared_tools()] == named
    for name in named:
        assert list(as_tool(getattr(kind, name)).parameters["properties"]) == ["number"]
        observation, *_, info = env.step(format_tool_call(name, {"number": 7}))
        assert observation == (
            "14" if name == "above" or name == "below" else f"14 {kind.__name__}"
        )
        assert "tool_errors" not in info


def test_they_are_in_a_process_of_their_own_too():
    with contextlib.closing(IsolatedEnv(f"{__file__}:BoundToo")) as env:
        env.reset(seed=0)
        for each in BoundToo.declared_tools():
            observation = env.step(format_tool_call(each.name, {"number": 7}))[0]
            assert observation.removesuffix(" BoundToo") == "14"


def test_a_static_or_class_method_may_be_listed_in_tools():
    class Lists(Tools):
        max_turns = 9

        @staticmethod
        def plain(number: int) -> int:
            """Doubles a number."""
            return 2 * number

        @classmethod
        def of_class(cls, number: int) -> str:
            """Doubles a number and names the class."""
            return f"{2 * number} {cls.__name__}"

        def method(self, number: int) -> str:
            """Doubles a number and names the class."""
            return f"{2 * number} {type(self).__name__}"

        tools = [plain, double, of_class, method]  # noqa: RUF012

    env = Lists()
    env.reset(seed=0)
    named = ["plain", "of_class", "method", "double"]
    assert [each.name for each in env.tools] == named
    results = [env.step(format_tool_call(name, {"number": 7}))[0] for name in named]
    assert results == ["14", "14 Lists", "14 Lists", "14"]


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (property(lambda self: 1), r"@tool got <property .*, expected a function or method"),
        (functools.partial(double, 7), "@tool got functools.partial"),
    ],
)
def test_what_is_no_function_is_no_tool(member, words):
    with pytest.raises(ConfigError, match=words):
        tool(member)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"price": property(ShopEnv.price)}, r"tool Other\.price is a property, expected a method"),
        (
            {"cheap": functools.partialmethod(ShopEnv.price, count=1)},
            r"tool Other\.cheap is a partialmethod",
        ),
        (
            {"price": lambda self, item: 1.0},
            r"Other\.price \(.*\) replaces a tool: decorate it .*= None",
        ),
        ({"tools": [lambda number: number]}, "has no docstring"),
        (
            {"tools": [double], "twice": Doubles.double},
            "Other has two tools 'double'; expected a name",
        ),
        ({"tools": [double, double]}, "Other has two tools 'double'; expected a name"),
    ],
)
def test_a_tool_is_never_lost_without_a_word(members, words):
    with pytest.raises(ConfigError, match=words):
        type("Other", (ShopEnv,), members)()


def test_a_subclass_drops_a_tool_with_none():
    class Poor(ShopEnv):
        price = None

    assert [each.name for each in Poor.declared_tools()] == ["fail", "leave", "echo"]


class Faulty:
    """Classes whose tools cannot be used; each is defined all the same."""

    class Static(Tools):
        @staticmethod
        @tool
        def look(word) -> str:
            """Look a word up."""
            return str(word)

    class Typed(Tools):
        @tool
        def look(word: str) -> str:
            """Look a word up."""
            return word

    class Held(Tools):
        twice = tool(double)

    class Undocumented(Tools):
        @tool
        def look(self, word: str) -> str:
            return word

    class Untyped(Tools):
        @tool
        def look(self, word) -> str:
            """Look a word up."""
            return str(word)

    class ListsUntyped(Tools):
        tools = [_untyped]  # noqa: RUF012

    class Bare(ShopEnv):
        def price(self, item: str) -> float:
            """It lacks the decorator."""
            return 1.0


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Faulty.Static, r"tool Static\.look\(word\) \({}\): annotate each parameter"),
        (Faulty.Typed, r"tool Typed\.look\(word\) \({}\): add self"),
        (Faulty.Held, r"tool Held\.twice\(number\) \({}\): add self"),
        (Faulty.Undocumented, r"tool Faulty\.Undocumented\.look \({}\) has no docstring"),
        (Faulty.Untyped, r"tool Faulty\.Untyped\.look \({}\): parameter word has no type anno"),
        (Faulty.ListsUntyped, r"tool _untyped \({}\): parameter key has no type annotation"),
        (Faulty.Bare, r"Bare\.price \({}\) replaces a tool"),
    ],
)
def test_a_faulty_tool_is_named_with_class_and_line_and_only_when_its_class_is_used(kind, words):
    with pytest.raises(ConfigError, match=words.format(r"test_tools\.py:\d+")):
        kind()
    with pytest.raises(ConfigError):
        kind.declared_tools()


def test_a_result_that_is_no_text_names_the_tool_and_its_line():
    class Pictures(Tools):
        @tool
        def draw(self) -> object:
            """Draw."""
            return object()

    env = Pictures()
    env.reset(seed=0)
    line = inspect.getsourcelines(Pictures.draw)[1]
    with pytest.raises(EnvironmentContractError, match=rf"Pictures\.draw \(test_tools.py:{line}\)"):
        env.step(format_tool_call("draw", {}))


def test_tools_without_a_function_of_their_own_are_equal():
    schema = as_tool(ShopEnv.price)
    fields = {key: getattr(schema, key) for key in ("name", "description", "parameters")}
    assert Tool(**fields) == Tool(**fields)
    assert Tool(**fields).validate({"any": 1}) == {"any": 1}
    with pytest.raises(NotImplementedError, match="called by"):
        Tool(**fields).function(item="tea")
