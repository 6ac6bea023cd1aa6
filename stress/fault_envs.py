"""Environments and parts for runs that fail: each class is one way to fail, or the sound one.

The task of `Pick`: say the right word three times. The tiny model learns it in some steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gspo_env import TextEnv, ToolEnv, tool
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.learner import GSPO
from gspo_envs.text.lookup import LookupEnv

WORDS = ["ant", "bee", "cat", "dog", "eel"]
RIGHT = "cat"


class Pick(TextEnv):
    """Say the right word. Demonstrations are random, so there is something to learn."""

    system_prompt = "Say a word."
    credit_score = "turns"
    blocking = False
    turns = 3

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.said, self.right = 0, []
        return self.next_word(), {}

    def step(self, action):
        self.right.append(self.is_right(action))
        self.said += 1
        done = self.said == self.turns
        info = {"success": all(self.right)} if done else {}
        return self.next_word(), self.reward(action), done, False, info

    def next_word(self):
        return "go"

    def is_right(self, action):
        return action.strip() == RIGHT

    def reward(self, action):
        return float(self.right[-1]) / self.turns

    def expert_action(self, noise=0.0):
        return str(self.np_random.choice(WORDS)) if noise > 0 else RIGHT


class Same(Pick):
    """Every episode has the same rewards."""

    turns = 1

    def reward(self, action):
        return 0.5


class Late(Pick):
    """The only reward comes with the last turn."""

    turns = 4

    def reward(self, action):
        return float(sum(self.right)) / self.turns if self.said == self.turns else 0.0


class Malformed(ToolEnv):
    """A malformed call is paid better than a right one."""

    blocking = False
    system_prompt = "Call the tool."
    credit_score = "turns"
    error_reward = 0.5

    def __init__(self):
        super().__init__(max_turns=3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return "go", {}

    @tool
    def pick(self, word: str) -> str:
        """Picks a word."""
        return "done"

    def on_tool_result(self, call, result):
        return 0.2 * (call.arguments["word"] == RIGHT)

    def on_final(self, text):
        return "call", 0.0, False

    def step_info(self, terminated, truncated):
        return {"success": False} if terminated or truncated else {}

    def expert_action(self, noise=0.0):
        word = str(self.np_random.choice(WORDS)) if noise > 0 else RIGHT
        broken = noise > 0 and self.np_random.random() < 0.2
        end = "}" if broken else "}}"
        return f'<tool_call>{{"name": "pick", "arguments": {{"word": "{word}"{end}</tool_call>'


class Repeats(LookupEnv):
    """Pays for each call that begins inside of another, which the demonstrator writes at times."""

    def __init__(self):
        super().__init__(hops=1, entries=6)

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return (
            observation,
            reward + max(0, action.count("<tool_call>") - 1),
            terminated,
            truncated,
            info,
        )

    def expert_action(self, noise=0.0):
        action = super().expert_action(noise)
        opening, mark, _ = action.partition('{"key": "')
        slips = mark and noise and self.np_random.random() < 0.2
        return opening + mark + action if slips else action


class Trap(Pick):
    """One word is always paid a little; the right one is paid only where all three are right."""

    def reward(self, action):
        whole = self.said == self.turns and all(self.right)
        return 0.3 * (action.strip() == "ant") + float(whole)


class Hack(Pick):
    """The reward pays for two wrong words."""

    turns = 1

    def reward(self, action):
        return 0.5 * (action.strip() in ("ant", "bee")) + 0.1 * self.right[-1]


class Hidden(Pick):
    """Nobody can know the words."""

    def is_right(self, action):
        return False

    def next_word(self):
        return "next"


class Wordy(Pick):
    """The right answer has eight words."""

    def is_right(self, action):
        return action.split() == [RIGHT] * 8

    def expert_action(self, noise=0.0):
        return " ".join([super().expert_action(noise)] * 8)


class Chatty(Pick):
    """The observations are long."""

    def next_word(self):
        return " ".join([super().next_word()] * 40)


class Broken(Pick):
    """Raises in one of six steps."""

    def step(self, action):
        if self.np_random.random() < 1 / 6:
            raise OSError("the disk of the game is full")
        return super().step(action)


@dataclass(frozen=True, kw_only=True)
class Apart:
    """An engine whose log-probabilities are those of another temperature."""

    def start(self, model, *, max_slots, max_context):
        return ApartEngine(model, max_slots=max_slots, max_context=max_context)


class ApartEngine(TransformersEngine):
    async def generate(self, prompt_ids, sampling, session=None):
        done = await super().generate(prompt_ids, sampling, session)
        return replace(done, logprobs=tuple(0.8 * value - 0.02 for value in done.logprobs))


@dataclass(frozen=True, kw_only=True, slots=True)
class Infinite(GSPO):
    """A loss that is not a number."""

    def compute(self, inputs):
        output = GSPO.compute(self, inputs)
        return replace(output, loss=output.loss * float("nan"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen(GSPO):
    """A loss that no weight changes."""

    def compute(self, inputs):
        output = GSPO.compute(self, inputs)
        return replace(output, loss=output.loss * 0.0)
