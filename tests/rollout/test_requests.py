"""What an environment may ask of the next action: a conversation, limits and stop texts."""

import asyncio
import copy
from dataclasses import replace

import pytest

from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.engines.base import Sampling, Transformers
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.engines.embedded.unpacked import UnbatchedEngine
from gspo_env.engines.parts import sample_parts
from gspo_env.env.base import TextEnv
from gspo_env.errors import RolloutError
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.metrics import RolloutStats
from gspo_env.rollout.play import PolicyOutput, play
from gspo_env.rollout.pool import EnvPool
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.types import Group, Message, StopReason, Task

TASK = Task(env_id="test", seed=0)


class Asking(TextEnv):
    """An environment that replays a list of `info`s, and records the actions."""

    def __init__(self, infos, first=None, cuts=False, steps=None):
        self.infos, self.first, self.actions = list(infos), first or {}, []
        self.takes_cut_actions = cuts
        self.steps = steps or len(self.infos) + 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.actions = []
        return "birch", self.first

    def step(self, action):
        self.actions.append(action)
        n = len(self.actions)
        info = self.infos[n - 1] if n <= len(self.infos) else {}
        return "stone", 0.0, n >= self.steps, False, info


def collect(env, model, chat, **limits):
    config = RolloutConfig(**{"group_size": 1, "max_turn_tokens": 12, "max_context": 200, **limits})
    engine = Transformers().start(model, max_slots=4, max_context=config.max_context)
    collector = Collector(engine, chat, EnvPool(lambda: env), config)
    ((group,),) = [asyncio.run(collector.collect([TASK], seed=1))]
    return group.episodes[0]


def moves(*stops):
    planned = iter(stops)

    def policy(now):
        stop = next(planned)
        tokens = () if stop is StopReason.MAX_CONTEXT else (1, 2)
        return PolicyOutput(
            text="a" if tokens else "", action_ids=tokens, logprobs=tokens, stop=stop
        )

    return policy


def test_an_environment_that_takes_cut_actions_hears_why_and_goes_on():
    env = Asking([{}, {}, {}], cuts=True, steps=4)
    policy = moves(StopReason.MAX_TURN_TOKENS, StopReason.MAX_CONTEXT, None, None)
    episode = asyncio.run(play(env, TASK, policy))
    assert [a.finish_reason for a in env.actions] == ["length", "context", "stop", "stop"]
    assert [str(a) for a in env.actions] == ["a", "", "a", "a"]
    assert episode.stop_reason is StopReason.TERMINATED
    assert len(episode.turns) == 3, "a prompt that did not fit is not a turn"


def test_an_environment_whose_prompts_never_fit_does_not_play_for_ever():
    env = Asking([{}] * 50, cuts=True)
    episode = asyncio.run(play(env, TASK, moves(None, *[StopReason.MAX_CONTEXT] * 50)))
    assert episode.stop_reason is StopReason.MAX_CONTEXT
    assert len(env.actions) < 12


def test_a_reward_for_a_prompt_that_did_not_fit_is_a_fault_of_the_environment():
    class Paying(Asking):
        def step(self, action):
            return "x", 1.0, False, False, {}

    episode = asyncio.run(play(Paying([], cuts=True), TASK, moves(StopReason.MAX_CONTEXT)))
    assert episode.stop_reason is StopReason.INVALID
    assert "expected 0" in episode.error


def test_the_outcome_of_an_episode_that_ends_with_a_prompt_that_did_not_fit_counts():
    env = Asking([{}, {"episodic_reward": 0.5, "success": True}], cuts=True, steps=2)
    policy = moves(None, StopReason.MAX_CONTEXT)
    episode = asyncio.run(play(env, TASK, policy))
    assert (episode.outcome, episode.success, len(episode.turns)) == (0.5, True, 1)


def test_the_limit_of_a_request_is_the_lower_one(model, chat):
    env = Asking([{"max_tokens": 1}, {"max_tokens": 500}], cuts=True, steps=6)
    episode = collect(env, model, chat, max_turns=3)
    sizes = [len(turn.action_ids) for turn in episode.turns]
    assert sizes[1] == 1
    assert sizes[2] <= 12


def test_a_program_without_a_limit_gets_the_room_that_is_left_and_reads_what_does_not_fit(
    model, chat
):
    size = len(chat.start("birch"))
    env = Asking(
        [{"max_tokens": 12, "messages": [Message(role="user", content="birch")]}], cuts=True
    )
    collect(env, model, chat, max_context=size + 7)
    answer, refusal = env.actions
    assert len(answer.token_ids) <= 7
    assert refusal.finish_reason == "context"
    assert f"is {size + 7} tokens; {size} in the prompt, 12 for the answer" in refusal


ENGINES = {
    "batched": lambda model: TransformersEngine(model, max_slots=2, max_context=64),
    "unbatched": lambda model: UnbatchedEngine(model, max_slots=2, max_context=64),
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("length", [1, 3])
def test_an_action_ends_with_the_token_that_completes_a_stop_text(model, chat, name, length):
    engine = ENGINES[name](model)
    prompt = list(chat.start("birch"))
    free = Sampling(max_tokens=30, seed=3)
    whole = asyncio.run(engine.generate(prompt, free)).token_ids
    text = chat.decode_all(whole[4 : 4 + length])
    ends = chat.ends(["nowhere", text])
    first = next(n for n in range(1, 31) if text in chat.decode_all(whole[:n]))
    done = asyncio.run(engine.generate(prompt, Sampling(max_tokens=30, seed=3, ends=ends)))
    assert done.token_ids == whole[:first], "the ids are those that are sampled without the text"
    assert done.finish_reason == "stop"


def test_an_engine_that_knows_no_stop_texts_samples_in_parts(model, chat):
    engine = ENGINES["batched"](model)
    prompt = list(chat.start("birch"))
    ends = chat.ends(["birch"])
    asked = Sampling(max_tokens=40, seed=5, ends=ends)
    done = asyncio.run(sample_parts(engine.generate, prompt, asked))
    stops = [n for n in range(1, len(done.token_ids) + 1) if ends(done.token_ids[:n])]
    assert stops in ([], [len(done.token_ids)])
    assert done.finish_reason == ("stop" if stops else "length")
    assert stops or len(done.token_ids) == 40


def test_the_environment_gets_the_text_before_the_stop_text_and_the_turn_all_tokens(model, chat):
    probe = collect(Asking([], steps=9), model, chat, max_turns=1, max_turn_tokens=60)
    text = chat.decode_all(probe.turns[0].action_ids[2:3])
    env = Asking([], first={"stop": [text]})
    episode = collect(env, model, chat, max_turn_tokens=60)
    (action,), (turn,) = env.actions, episode.turns
    assert text not in action
    assert chat.decode_all(turn.action_ids).partition(text)[0] == action == turn.text


def test_a_conversation_that_the_template_refuses_is_the_environments_fault(tokenizer, model):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = (
        "{% if messages|length > 3 %}{{ raise_exception('too many') }}{% endif %}"
        + tokenizer.chat_template
    )
    talk = [{"role": "user", "content": "stone"}] * 4
    env = Asking([{"messages": talk}], cuts=True)
    with pytest.raises(RolloutError, match=r"1 of 1.*conversation.*too many"):
        collect(env, model, ChatTokenizer(strict, history="keep"))


def test_an_action_knows_the_tokens_of_its_prompt_also_of_one_that_does_not_fit(player):
    long = {"messages": [{"role": "user", "content": "stone " * 400}]}
    env = Asking([{}, long], cuts=True, steps=3)
    episode = collect(env, player.model, player.chat)
    lengths = [action.prompt_tokens for action in env.actions]
    assert [action.finish_reason for action in env.actions][2] == "context"
    first, second = episode.turns
    assert lengths[0] == len(first.prompt_ids)
    assert lengths[1] == lengths[0] + len(first.action_ids) + len(second.prompt_ids)
    assert lengths[2] > 200


def test_malformed_calls_are_the_environments_count_and_a_mean_over_episodes(player):
    env = Asking([{"malformed_calls": 2}, {}, {"malformed_calls": 1}], steps=3)
    episode = collect(env, player.model, player.chat)
    group = Group(task=TASK, episodes=(episode, replace(episode, turns=episode.turns[:1])))
    metrics = RolloutStats([group], 1.0).metrics()
    assert metrics["rollout/malformed_calls"] == 2.5
    assert "rollout/reward/malformed_calls" not in metrics
