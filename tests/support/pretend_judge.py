"""A judge behind a real HTTP server that scores the word after `quality`, as well as told."""

import json
import random
import re
import threading
from contextlib import contextmanager

from gspo_env.types import Group, Task, Turn
from support import pretend_http
from support.turns import episode

BLOCK = re.compile(
    r"^\((?:The answer|Answer \d+) begins (\w+)\.\)$(.*?)^\([^\n]* ends \1\.\)$", re.M | re.S
)


def qualities(question):
    """The last quality in each answer that is shown, at most 10; 0 without one."""
    texts = [text for _, text in BLOCK.findall(question)]
    return [min(10, int((re.findall(r"quality (\d+)", text) or [0])[-1])) for text in texts]


def good(question):
    values = qualities(question)
    if len(values) == 1:
        return str(values[0])
    tiers = [[n + 1 for n, v in enumerate(values) if v == each] for each in sorted(set(values))]
    return " > ".join(" = ".join(map(str, tier)) for tier in reversed(tiers))


def noisy(question):
    draw = random.Random(question)
    order = list(range(1, len(qualities(question)) + 1))
    draw.shuffle(order)
    return " > ".join(map(str, order)) if len(order) > 1 else str(draw.randrange(11))


def first(question):
    return " > ".join(map(str, range(1, len(qualities(question)) + 1)))


class PretendJudge:
    """What the server does, and what it has seen."""

    def __init__(self, answer=good):
        self.answer, self.before = answer, lambda number, question: None
        self.questions, self.answered, self.keys, self.most = [], [], [], 0
        self._lock, self._running = threading.Lock(), 0

    def reply(self, handler):
        body = handler.body()
        question = json.loads(body)["messages"][-1]["content"]
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
            self.questions.append(question)
            self.keys.append(handler.headers["authorization"])
            number = len(self.questions)
        try:
            text = self.before(number, question)
            text = self.answer(question) if text is None else text
            if isinstance(text, int):
                handler.answer({"error": "down"}, text)
            elif isinstance(text, tuple):
                handler.answer({"error": "down"}, *text)
            elif isinstance(text, bytes):
                handler.send_response(200)
                handler.send_header("content-length", str(len(text)))
                handler.end_headers()
                handler.wfile.write(text)
            else:
                self.answered.append(body)
                choice = {"message": {"role": "assistant", "content": text}}
                usage = {"prompt_tokens": 100, "completion_tokens": 1}
                handler.answer({"choices": [choice], "usage": usage})
        finally:
            with self._lock:
                self._running -= 1


@contextmanager
def serve(answer=good):
    judge = PretendJudge(answer)
    with pretend_http.serve(do_POST=lambda handler: judge.reply(handler)) as url:
        judge.url = f"{url}/v1"
        yield judge


def group(*episodes, rewards=()):
    """A group whose episodes have these actions, and these rewards at the end."""
    task, played = Task(env_id="test", seed=0), []
    for g, texts in enumerate(episodes):
        reward = rewards[g] if rewards else 0.0
        turns = [
            Turn(
                text=text,
                observation="Say something good." if k == 0 else "Go on.",
                reward=reward if k == len(texts) - 1 else 0.0,
            )
            for k, text in enumerate(texts)
        ]
        played.append(episode(*turns, task=task, outcome=None))
    return Group(task=task, episodes=tuple(played))
