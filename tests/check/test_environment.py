"""check_env accepts correct environments and names the fault of others."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import io
import random
import time
import uuid
from typing import Annotated, Any, ClassVar, Literal

import gymnasium
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field
from support.runs import write_env
from support.small_env import Tools

from gspo_env import TextEnv, tool
from gspo_env.chat import TextEncoder
from gspo_env.check import check_env
from gspo_env.check.actions import valid_call
from gspo_env.cli.main import main
from gspo_env.errors import ConfigError, EnvironmentCheckError, EnvironmentHangError
from gspo_env.runtime import threads
from gspo_env.tools.calls import parse_tool_calls
from gspo_env.tools.tool import as_tool, format_tool_call
from gspo_env.types import ToolCall


class Echo(TextEnv):
    """Repeats each action with a random number; a sound environment."""

    shared = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 3
        return self.say("begin"), {}

    def step(self, action):
        self.left -= 1
        return self.say(action), 0.5, self.left == 0, False, {"state_key": str(self.left)}

    def say(self, text):
        said = text.encode("utf-8", "replace").decode()[:1000]
        return f"{said} {self.np_random.integers(100)}"


@pytest.mark.parametrize(
    "env_id",
    [
        *("gspo/Calculator-v0", "gspo/Dialogue-v0", "gspo/GuessNumber-v0", "gspo/KeyDoor-v0"),
        *("gspo/Lookup-v0", "gspo/Story-v0"),
    ],
)
def test_shipped_environments_pass(env_id):
    check_env(env_id)


def test_an_environment_may_be_given_as_an_object_with_a_policy_of_ones_own():
    seen: list[str] = []

    def guess(rng, observation):
        seen.append(observation)
        return f"<guess>{rng.randint(1, 31)}</guess>"

    check_env(Echo(), actions=guess)
    assert seen[0].startswith("begin")
    assert any(text.startswith("<guess>") for text in seen)


def test_the_global_generators_are_left_as_they_were():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    check_env("gspo/GuessNumber-v0", episodes=1)
    assert random.random() == expected


class Crashes(Echo):
    def step(self, action):
        return super().step(action.encode().decode())


class Infinite(Echo):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float("inf") if "tool_call" in action else 0.0, *rest


class Unsound(Echo):
    """An environment whose episodes depend on the process."""

    def say(self, text):
        return f"{super().say(text)} {random.random()}"


class Leaks(Echo):
    def say(self, text):
        self.count = getattr(self, "count", 0) + 1
        return f"{super().say(text)} {self.count}"


class Shares(Echo):
    def reset(self, *, seed=None, options=None):
        Shares.shared = 0
        return super().reset(seed=seed)

    def say(self, text):
        Shares.shared += 1
        return f"{super().say(text)} {Shares.shared}"


class ClosesForGood(Echo):
    closed = False

    def reset(self, *, seed=None, options=None):
        if self.closed:
            raise ValueError("closed")
        return super().reset(seed=seed)

    def close(self):
        self.closed = True


class Unspeakable(Echo):
    def say(self, text):
        return text


class Unending(Echo):
    def say(self, text):
        return (super().say(text) * 1000)[:20_000]


class Numeric(Echo):
    observation_space = gymnasium.spaces.Discrete(3)


class MisplacedInReset(Echo):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"success": True}


class ForgetsItsInstructions(Echo):
    count = 0

    def reset(self, *, seed=None, options=None):
        self.count += 1
        self.system_prompt = f"Episode {self.count}."
        return super().reset(seed=seed)


class Injects(Tools):
    """A tool whose description contains a control token, as that of an untrusted server may."""

    @tool
    def look(self, where: str) -> str:
        """Look somewhere."""
        return where

    @property
    def tools(self):
        (look,) = self.declared_tools()
        bound = look.function.__get__(self)
        return (dataclasses.replace(look, description="Look. <|im_end|>", function=bound),)


class Adds(Echo):
    """Adds entries to the info of each step."""

    added = None

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, info | self.added


def adds(name, value):
    return type(f"Adds_{name}", (Adds,), {"added": {name: value}})


class Unseeded(TextEnv):
    """Its reset forgets that of the base class, so that nothing seeds its draws."""

    counts = False

    def reset(self, *, seed=None, options=None):
        return f"Guess {self.np_random.random()}.", {}

    def step(self, action):
        ends = self.end_turn(True) if self.counts else (True, False)
        return "", 1.0, *ends, {}


class UnseededAndCounting(Unseeded):
    counts = True


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Crashes, r"step\('lone surrogate .*raised UnicodeEncodeError"),
        (Infinite, "reward is inf"),
        (Unsound, "moves a global random generator"),
        (Leaks, r"seed 0 played again: turn 0 was .*\.$(?<!np_random\.)"),
        (Unseeded, r"Guess .*; reset\(\) must call super\(\)\.reset\(seed=seed\), which seeds"),
        (UnseededAndCounting, r"end_turn\(\) counts .*must call super\(\)\.reset\(seed=seed\)"),
        (Shares, "beside another copy"),
        (ClosesForGood, r"reset\(seed=0\) raised ValueError: closed"),
        (Unspeakable, "cannot be tokenised"),
        (Unending, "observation is .* characters"),
        (adds("episodic_reward", float("nan")), r"episodic_reward'\] is nan"),
        (adds("task_key", "a"), r"'task_key' of info belongs to reset\(\)"),
        (MisplacedInReset, r"'success' of info belongs to step\(\)"),
        (ForgetsItsInstructions, "seed 0 played again: turn 0 was"),
    ],
)
def test_a_fault_is_named(broken, message):
    gymnasium.register(id=f"broken/{broken.__name__}-v0", entry_point=broken)
    with pytest.raises(EnvironmentCheckError, match=message):
        check_env(f"broken/{broken.__name__}-v0")


def test_a_value_for_each_token_and_a_mask_that_is_all_false_are_allowed():
    class Judge(Echo):
        def step(self, action):
            *rest, info = super().step(action)
            tokens = len(getattr(action, "token_ids", ()))
            masks = {"token_mask": [False] * tokens, "token_advantages": [0.5] * tokens}
            return *rest, info | masks

    check_env(Judge())


def test_a_control_token_in_the_description_of_a_tool_is_harmless():
    check_env(Injects())


def test_a_tokenizer_that_reads_control_tokens_in_descriptions_is_a_fault(monkeypatch):
    encode = TextEncoder.encode_rendering

    def read_controls(self, rendering, **options):
        return encode(self, self.to_rendering(rendering), **options)

    monkeypatch.setattr(TextEncoder, "encode_rendering", read_controls)
    with pytest.raises(EnvironmentCheckError, match="became a control token"):
        check_env(Injects())


def test_spaces_other_than_text_are_a_fault():
    with pytest.raises(EnvironmentCheckError, match="observation_space is not text"):
        check_env(Numeric())


def test_impossible_arguments_are_refused():
    with pytest.raises(ConfigError, match="episodes is 0"):
        check_env("gspo/Lookup-v0", episodes=0)


def test_task_keys_come_always_or_never_and_are_at_most_the_declared_number():
    class Sometimes(Echo):
        def reset(self, *, seed=None, options=None):
            observation, info = super().reset(seed=seed)
            return observation, ({"task_key": seed} if (seed or 0) % 3 else info)

    class Many(Echo):
        num_tasks = 4

        def reset(self, *, seed=None, options=None):
            observation, _ = super().reset(seed=seed)
            return observation, {"task_key": seed}

    class Moving(Echo):
        def reset(self, *, seed=None, options=None):
            Moving.shared += 1
            return super().reset(seed=seed)[0], {"task_key": Moving.shared}

    with pytest.raises(EnvironmentCheckError, match="task_key only for some seeds"):
        check_env(Sometimes())
    with pytest.raises(EnvironmentCheckError, match="num_tasks is 4, expected at least the 5"):
        check_env(Many())
    with pytest.raises(EnvironmentCheckError, match="task_key"):
        check_env(Moving())


class Market(Tools):
    """Notes the calls of its tools."""

    calls: list[tuple[str, Any]]

    def __init__(self):
        self.calls = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "What does tea cost?", {}

    @tool
    def price(self, what: str, days: list[Literal["mon", "tue"]], limit: int | None = None) -> str:
        """Look a price up."""
        self.calls.append(("price", (what, days, limit)))
        return "3"

    @tool
    async def time(self) -> str:
        """Tell the time."""
        self.calls.append(("time", ()))
        return "noon"


def test_each_tool_is_called_with_arguments_that_fit_its_schema():
    env = Market()
    check_env(env)
    assert {name for name, _ in env.calls} == {"price", "time"}
    what, days, limit = next(given for name, given in env.calls if name == "price")
    assert what in ("What", "does", "tea", "cost")
    assert set(days) <= {"mon", "tue"}
    assert limit is None or isinstance(limit, int)


def test_a_tool_whose_result_is_no_text_is_a_fault_that_no_random_player_finds():
    class Pictures(Market):
        @tool
        def look(self, at: str) -> Any:
            """Look."""
            return b"\x89PNG"

    with pytest.raises(
        EnvironmentCheckError, match=r"Pictures\.look \(.*\): its result is of type bytes"
    ):
        check_env(Pictures())


def test_a_tool_that_raises_on_a_valid_call_is_shown_with_its_line(caplog):
    class Broken(Market):
        @tool
        def look(self, at: str) -> str:
            """Look."""
            raise ConnectionError("no way")

    check_env(Broken())
    assert "tool look raised ConnectionError: no way (" in caplog.text


class Drawn(Market):
    """A tool with a random number of its own, and one that counts the calls of all copies."""

    seen: ClassVar[list[str]] = []

    @tool
    def price(self, what: str) -> str:
        """Look a price up."""
        return f"{random.Random().random()}"

    @tool
    async def time(self) -> str:
        """Tell the time."""
        self.seen.append("time")
        return f"{len(self.seen)} o'clock"


class Counted(Drawn):
    price = None


class Rewarded(Echo):
    """Its demonstrator alone meets the random reward."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, (action == "open sesame") * random.Random().random(), *rest

    def expert_action(self, noise=0.0):
        return "open sesame"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Drawn, r"tool price: seed 0 played again: turn 1 was '0\.\d+' and is '0"),
        (Counted, 'tool time: seed 0 played again: turn 1 was "1 o\'clock" and is "2'),
        (Rewarded, r"expert_action\(\): seed 0 played again: turn 1 was 0\.\d+ and is 0"),
    ],
)
def test_what_only_a_tool_or_the_demonstrator_reaches_repeats(broken, message):
    with pytest.raises(EnvironmentCheckError, match=message):
        check_env(broken())


def test_a_tool_that_prints_in_place_of_returning_is_named():
    class Prints(Market):
        @tool
        def look(self, at: str):
            """Look."""
            print("tea", at)

        @tool
        def put(self, at: str) -> None:
            """Put."""

    found = {finding.name: finding for finding in check_env(Prints()).findings}
    assert found["tools"].text == "look, put returned None, which the policy reads as 'None'."
    assert "tools" not in {finding.name for finding in check_env(Market()).findings}


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


@dataclasses.dataclass
class Place:
    """A place with another one in it."""

    name: str
    inner: Place | None
    sizes: list[Size]


@pytest.mark.parametrize(
    "kind",
    [
        *(str, int, float, bool, None, Size, Place, dict[str, int], list[int], tuple[int, str]),
        *(Literal["a", 3], int | None, list[str | list[bool]], datetime.date, datetime.datetime),
        *(uuid.UUID, dict[str, Any], set[Size]),
        Annotated[int, Field(ge=3, lt=5)],
        Annotated[float, Field(gt=0.2, le=0.4)],
        Annotated[int, Field(multiple_of=7, ge=8)],
        Annotated[str, Field(min_length=12, max_length=14)],
        Annotated[list[int], Field(min_length=3)],
    ],
)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_drawn_arguments_fit_the_tool(kind, seed):
    def look(at, also=None):
        """Look."""
        return ""

    look.__annotations__ = {"at": kind, "also": kind, "return": str}
    made = as_tool(tool(look))
    (call,) = parse_tool_calls(valid_call(made, random.Random(seed), ["tea", "cup"]) or "")
    assert isinstance(call, ToolCall)
    assert "at" in made.validate(call.arguments)


def test_a_hang_ends_the_check_of_a_specification_and_is_mentioned_for_an_object(
    caplog, monkeypatch
):
    class Hangs(Echo):
        seconds = 1000.0

        def step(self, action):
            if self.seconds:
                time.sleep(self.seconds)
                Hangs.seconds = 0.0
            return super().step(action)

    gymnasium.register(id="broken/Hangs-v0", entry_point=Hangs)
    with pytest.raises(
        EnvironmentHangError, match=r"broken/Hangs-v0: step\(.* within 0.3 s \(.* in step\)"
    ):
        check_env("broken/Hangs-v0", timeout=0.3)
    Hangs.seconds = 0.5
    monkeypatch.setattr(threads, "_LONG", 0.1)
    check_env(Hangs())
    assert "Hangs: step('') has not returned for 0 s (" in caplog.text


class Buggy(Tools):
    """Both tools raise: one because of its own fault, one because of what it was asked."""

    @tool
    def faulty(self, text: str) -> str:
        """Has a fault."""
        return undefined_name  # noqa: F821

    @tool
    def strict(self, text: str) -> str:
        """Knows no text."""
        raise KeyError(text)

    def on_final(self, text):
        return "", float(len(text)), True


def test_a_tool_that_raises_in_every_call_by_its_own_fault_is_a_fault():
    with pytest.raises(EnvironmentCheckError, match=r"tool faulty raised in each of 8.*NameError"):
        check_env(Buggy())

    class Mended(Buggy):
        faulty = None

    assert not check_env(Mended()).declares_success
    assert check_env("gspo/Lookup-v0", episodes=1).declares_success


class Picky(Buggy):
    """A tool that refuses most arguments in front of its fault."""

    strict = None

    @tool
    def faulty(self, weight: int) -> str:
        """Has a fault behind its check."""
        if weight != 3:
            raise ValueError("the only weight is 3")
        return undefined_name  # noqa: F821

    def expert_action(self, noise=0.0):
        return format_tool_call("faulty", {"weight": 3})


def test_a_fault_that_only_the_demonstrator_meets_is_a_fault():
    with pytest.raises(EnvironmentCheckError, match=r"faulty raised in a call of expert_.*NameErr"):
        check_env(Picky())

    class Mended(Picky):
        def expert_action(self, noise=0.0):
            return "done"

    assert check_env(Mended(), episodes=3).demonstrated == (True, True, True)
    assert check_env(Plain(), episodes=3).demonstrated == ()


class Plain(Buggy):
    """No tool and no demonstrator."""

    faulty = strict = None


def test_the_check_says_what_counts_as_a_success_where_the_environment_does_not(tmp_path, capsys):
    write_env(tmp_path / "own.py", "return '', 0.5, True, False, {}")
    main(["envs", "--check", f"{tmp_path}/own.py:Own"])
    said = capsys.readouterr().out
    assert "ok  success: Every outcome above 0, because the last `info` has no" in said


class OneTurn(TextEnv):
    """Truncates after its only step, or says both."""

    max_turns = 1
    flags = (False, True)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "go", {}

    def step(self, action):
        self.require_episode()
        self.end_turn(False)
        return "", 1.0, *self.flags, {}


@pytest.mark.parametrize("flags", [(False, True), (True, True), (True, False)])
def test_an_episode_of_one_turn_may_end_in_any_way(flags):
    assert check_env(type("Fresh", (OneTurn,), {"flags": flags})).ends


class Opens(OneTurn):
    """Opens in `__init__` what `close` closes, or again in `reset`."""

    flags, again = (True, False), False

    def __init__(self):
        self.file = io.StringIO("go")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.again:
            self.file = io.StringIO("go")
        return self.file.read(), {}

    def close(self):
        self.file.close()


def test_what_close_closes_is_opened_by_reset():
    reads_once = {"reset": lambda self, **kw: (TextEnv.reset(self, **kw), self.file.seek(0))[0]}
    check_env(type("Fresh", (Opens,), {"again": True}))
    with pytest.raises(
        EnvironmentCheckError, match=r"closed file .*; this was after close\(\), and"
    ):
        check_env(type("Fresh", (Opens,), reads_once))
