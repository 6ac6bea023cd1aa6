"""What can never work is refused before PyTorch is loaded and a demonstration plays."""

import json
import subprocess
import sys

import pytest

ENVS = """
from gspo_env import TextEnv


class Own(TextEnv):
    '''Each call is noted in a file.'''

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Say yes.", {"words": 3}

    def step(self, action):
        return "", 1.0, True, False, {}

    def expert_action(self, noise=0.0):
        print("x", end="", file=open("played", "a"))
        return "yes"


class Edits(Own):
    '''It sends its own conversations.'''

    def step(self, action):
        ends = self.end_turn(self.turns_played == 2)
        return "and", 1.0, *ends, {"messages": [{"role": "user", "content": "and"}]}


class Cuts(Own):
    takes_cut_actions = True
"""
CHILD = """
import json, os, sys
from gspo_env.cli.main import main

# what stands for packages that are missing here and there
sys.modules.update(dict.fromkeys(["vllm", "ray", "bitsandbytes", "wandb", "tensorboard"]))
for flags in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if not os.fork():
        os.dup2(write, 2)
        code = None
        try:
            main(flags)
        except SystemExit as end:
            code = end.code
        print(f"<{code} {'torch' in sys.modules}>", file=sys.stderr, flush=True)
        os._exit(0)
    os.close(write)
    os.wait()
    print(json.dumps(open(read).read()), flush=True)
"""
"""Runs commands in forks of one process that has not loaded PyTorch."""
CASES = [
    ("--output full", "'full' is not empty"),
    ("--output full/file/run", "'full/file/run', because"),
    ("--engine vllm", "needs vllm, which is not installed: pip install 'gspo-env[vllm]'"),
    ("--workers ray:2", "expected --engine vllm-server, on whose servers"),
    (
        "--workers ray:2 --engine vllm-server --addresses http://127.0.0.1:1",
        "needs ray, which is not installed: pip install 'gspo-env[ray]'",
    ),
    ("--optimizer adamw_8bit", "needs bitsandbytes, which is not installed: pip install bits"),
    ("--optimizer own.py:missing", "expected a name in own.py"),
    ("--tracker wandb", "needs wandb, which is not installed: pip install 'gspo-env[wandb]'"),
    ("--tracker none,tensorboard", "pip install 'gspo-env[tensorboard]'"),
    (
        "--tracker mlflow --tracker.tracking-uri http://127.0.0.1:1",
        "'http://127.0.0.1:1', which MLflow cannot open: ",
    ),
    ("--advantage distillation", "teacher is 'self' and hint is ''"),
    ("--advantage distillation --hint nokey", "info['nokey'] of reset is None in custom/Own-v0"),
    ("--advantage distillation --hint words", "info['words'] of reset is 3 in custom/Own-v0"),
    ("--score sum", "the episodes of custom/Own-v0 have no outcome of their own"),
    ("--eval-tasks all", "custom/Own-v0 has no num_eval_tasks"),
    (
        "compare --env own.py:Own --tracker none --eval-tasks all --arm gamma=0.9,1",
        "custom/Own-v0 has no num_eval_tasks",
    ),
    ("--group-size 1", "group_size is 1, and the estimator 'returns_to_go'"),
    ("--advantage gigpo --group-size 1", "group_size is 1, and the estimator 'gigpo'"),
    ("--compaction summary --env own.py:Edits", "custom/Edits-v0 sends its own conversations"),
    ("--compaction summary --env own.py:Cuts", "custom/Cuts-v0 sends its own conversations"),
    (
        "--env one=own.py:Own two=own.py:Edits --compaction summary",
        "two sends its own conversations",
    ),
    (
        "compare --env own.py:Own --tracker none --arm optimizer=adamw,adamw_8bit",
        "needs bitsandbytes, which is not installed",
    ),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """What each case prints on stderr, and the folder in which all ran."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "own.py").write_text(ENVS)
    (folder / "full").mkdir()
    (folder / "full/file").touch()
    base = ["train", "--env", "own.py:Own", "--tracker", "none"]
    commands = [
        flags.split() if flags.startswith("compare") else [*base, *flags.split()]
        for flags, _ in CASES
    ]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(commands)],
        **{"cwd": folder, "capture_output": True, "text": True, "check": True},
    )
    shown = [json.loads(line) for line in child.stdout.splitlines() if line.startswith('"')]
    return dict(zip([flags for flags, _ in CASES], shown, strict=True)), folder


@pytest.mark.parametrize(("flags", "words"), CASES)
def test_what_can_never_work_is_refused_before_pytorch_is_loaded(refusals, flags, words):
    shown = refusals[0][flags]
    assert words in shown
    assert shown.endswith("<2 False>\n")
    assert len(shown.splitlines()) == 2


def test_nothing_is_made_before_a_refusal_and_few_episodes_are_played(refusals):
    shown, folder = refusals
    assert sorted(path.name for path in folder.iterdir()) == ["full", "own.py", "played"]
    assert len((folder / "played").read_text()) <= 4 * len(shown)
