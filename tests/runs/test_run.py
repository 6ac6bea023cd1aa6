"""What the reader of a run gives equals what the run wrote."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.runs import tiny

from gspo_env.config import to_dict, to_toml
from gspo_env.episodes.writer import to_table
from gspo_env.runs import Run
from gspo_env.tools.tool import Tool, as_tool, tool
from gspo_env.tracking.base import RunInfo, flatten
from gspo_env.tracking.jsonl import RunFiles
from gspo_env.types import (
    FAILURES,
    Ending,
    Episode,
    Fault,
    Group,
    Message,
    Prompt,
    ResetInfo,
    StepInfo,
    StopReason,
    Task,
    Timing,
    ToolCall,
    Turn,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
key = st.none() | text
ids = st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple)
number = st.floats(-1e6, 1e6)
logprob = st.floats(-50, 0, width=32)
value = st.integers(-9, 9) | text | st.none() | st.lists(text, max_size=2)
arguments = st.dictionaries(text, value, max_size=2)
calls = st.builds(ToolCall, name=text, arguments=arguments, id=text)
spoken = st.builds(
    Message,
    role=st.sampled_from(["user", "assistant", "tool"]),
    content=text,
    reasoning=st.none() | st.text("ab", min_size=1, max_size=5),
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    tool_call_id=st.none() | st.just("call-1"),
    name=st.none() | st.just("look"),
)


@tool
def look(word: str, times: int = 1) -> str:
    """Look a word up."""
    return word * times


@tool
def forget() -> str:
    """Forget everything."""
    return ""


TOOLS = (as_tool(look), as_tool(forget))


@st.composite
def episodes(draw, task):
    """An episode with every field that a run keeps."""
    tools = st.sampled_from([TOOLS, TOOLS[:1], TOOLS[1:]])
    count = draw(st.integers(0, 4))
    infos = draw(
        st.lists(
            st.builds(
                StepInfo,
                observation_role=st.sampled_from(["user", "tool"]),
                messages=st.none() | st.lists(spoken, max_size=2).map(tuple),
                tools=st.none() | st.just(()) | tools,
                agent=key,
                state_key=key,
            ),
            min_size=count,
            max_size=count,
        )
    )
    infos[-1:] = [StepInfo()] * bool(count)  # nothing follows the last turn
    kinds = ["action"] * count
    for k in range(1, count):
        if kinds[k - 1] == "action" and draw(st.booleans()):
            kinds[k] = "summary"
            last = k == count - 1  # no action met the observation before it
            met = {"observation_role": "user", "state_key": None} if last else {}
            infos[k - 1] = replace(infos[k - 1], **met)
            role = infos[k - 1].observation_role
            infos[k] = replace(infos[k], observation_role=role, state_key=None)
    reset = ResetInfo(task_key=draw(key))
    if count:
        reset = replace(reset, agent=draw(key), state_key=draw(key))
    turns = []
    for k in range(count):
        state_key = infos[k - 1].state_key if k else reset.state_key
        if k and kinds[k - 1] == "summary":
            state_key = infos[k - 2].state_key
        sampled = draw(ids)
        split = draw(st.integers(0, len(sampled)))
        runs = [(3, split), (4, len(sampled) - split)] if 0 < split < len(sampled) else []
        turn = Turn(
            kind=kinds[k],
            observation=draw(text),
            text=draw(text | st.just('<tool_call>{"name": "look", "arguments": {}}</tool_call>')),
            reward=draw(number),
            parent=draw(st.none() | st.integers(0, k - 1)) if k else None,
            fork=draw(st.sampled_from([None, "template", "edited", "compacted", "new"])),
            prompt_ids=draw(ids),
            action_ids=sampled,
            logprobs=tuple(draw(logprob) for _ in sampled),
            weights_version=3,
            weights_versions=tuple(runs),
            timing=Timing(generate=draw(st.floats(0, 9)), step=draw(st.floats(0, 9))),
            state_key=None if kinds[k] == "summary" else state_key,
            info=replace(infos[k], reward_parts=draw(st.dictionaries(text, number, max_size=2))),
        )
        turns.append(turn)
    reason = draw(st.sampled_from(StopReason))
    failed = reason in FAILURES
    return Episode(
        task=task,
        prompt=Prompt(
            system=draw(st.none() | text),
            tools=draw(st.just(()) | tools),
            messages=draw(st.lists(spoken, max_size=3).map(tuple)),
        ),
        turns=tuple(turns),
        ending=Ending(
            reason=reason,
            outcome=draw(st.none() | number),
            success=draw(st.booleans()),
            fault=Fault(reason=reason, message=draw(text), where="") if failed else None,
        ),
        final_observation=draw(text),
        reset=reset,
    )


@st.composite
def groups(draw):
    task = Task(env_id=draw(text), seed=draw(st.integers(0, 2**40)), options=draw(arguments))
    played = draw(st.lists(episodes(task), min_size=1, max_size=3))
    return Group(task=task, episodes=tuple(played))


def listed(tools):
    return tools if tools is None else tuple(map(without_function, tools))


def without_function(each):
    return Tool(name=each.name, description=each.description, parameters=each.parameters)


def as_read(episode):
    """The episode as it is read: a tool has no function."""
    turns = [replace(t, info=replace(t.info, tools=listed(t.info.tools))) for t in episode.turns]
    prompt = replace(episode.prompt, tools=listed(episode.prompt.tools))
    return replace(episode, prompt=prompt, turns=tuple(turns))


@settings(max_examples=40)
@given(st.lists(groups(), min_size=1, max_size=2))
def test_the_episodes_of_a_run_are_those_that_it_wrote(played):
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "episodes").mkdir()
        (folder / "metrics.jsonl").touch()
        for step, phase in ((1, "train"), (1, "eval")):
            table = to_table(step, phase, dict(enumerate(played)), {})
            assume(not any(table["redacted"].to_pylist()))
            pq.write_table(table, folder / f"episodes/{step:06d}-{phase}.parquet")
        run = Run.open(folder)
        expected = [as_read(episode) for group in played for episode in group.episodes]
        assert run.episodes(phases=["eval"]) == expected
        assert run.episodes() == [*expected, *expected]


metrics = st.dictionaries(st.sampled_from(["a", "b/c", "rollout/x"]), number, max_size=3)


@given(st.lists(metrics, max_size=6), st.integers(0, 2**40))
def test_the_settings_and_metrics_of_a_run_are_those_that_it_wrote(history, seed):
    config = tiny(seed=seed, env="gspo/Lookup-v0", env_kwargs={"hops": 2})
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.toml").write_text(to_toml(config))
        files = RunFiles(RunInfo(name="run", folder=folder), tracked=False)
        for step, values in enumerate(history):
            files.log(values, step)
        files.close()
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 99, "met')  # killed while it wrote
        run = Run.open(folder)
        series = {n: dict(zip(s.steps, s.values, strict=True)) for n, s in run.series.items()}
    expected: dict[str, dict[int, float]] = {}
    for step, values in enumerate(history):
        for metric, value in values.items():
            expected.setdefault(metric, {})[step] = value
    assert series == expected
    written = flatten(json.loads(json.dumps(to_dict(config))))
    written = {name: value for name, value in written.items() if value not in (None, {})}
    assert {name: value for name, value in run.settings.items() if value != {}} == written
