"""A real OpenEnv server for the tests: `python openenv_server.py SESSIONS PORT`."""

import os
import random
import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Heard(Observation):
    text: str
    turn: int


class Guess(Environment):
    """Guess a digit; three actions make the server fail, and `quit` ends without a reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="", step_count=0)
        self.number = 0

    def reset(self, seed=None, episode_id=None, highest=9, **kwargs):
        self.number = random.Random(seed).randint(0, highest)
        self._state = State(episode_id=episode_id or "", step_count=0)
        return Heard(text=f"Guess from 0 to {highest}.", turn=0)

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        said = action.message.strip()
        if said == "crash":
            raise RuntimeError("the dice fell off the table")
        if said == "hang":
            time.sleep(5)
        if said == "die":
            os._exit(3)
        if said in ("wait", "quit"):
            return Heard(text="", turn=0, reward=None, done=said == "quit")
        right = said == str(self.number)
        return Heard(
            text="yes" if right else f"no, after {self._state.step_count}",
            turn=self._state.step_count,
            reward=float(right),
            done=right,
        )

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Guess, Say, Heard, max_concurrent_envs=int(sys.argv[1]))
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
