"""Tasks and rewards of the look-up agents: `python lookup_tasks.py 1000 > lookup.jsonl`."""

import json
import random
import sys

from gspo_env.env.base import extract_tag
from gspo_envs.text.lookup import WORDS

PROMPT = (
    "Follow the links with the lookup tool, one call per turn. Each call returns the next "
    "word. After the last link, answer with <answer>word</answer>."
)


def make_task(seed):
    rng = random.Random(seed)
    cycle, hops = rng.sample(WORDS, 24), rng.randint(2, 4)
    return {
        "prompt": PROMPT,
        "question": f'Follow {hops} links from "{cycle[0]}".',
        "links": dict(zip(cycle, cycle[1:] + cycle[:1], strict=True)),
        "path": cycle[1 : hops + 1],
    }


def right(attempt):
    """1.0 for the right answer, which the program returned."""
    return float(extract_tag(attempt.result or "", "answer") == attempt.row["path"][-1])


def hops(attempt):
    """0.2 for each right word in order, which the tool returned."""
    path = list(attempt.row["path"])
    for message in attempt.completion:
        if path and message["role"] == "tool" and message["content"] == path[0]:
            del path[0]
    return 0.2 * (len(attempt.row["path"]) - len(path))


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        print(json.dumps(make_task(seed)))
