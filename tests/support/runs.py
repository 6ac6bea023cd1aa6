"""What tests of whole runs share."""

import json
from hashlib import sha256

from gspo_env.config import Config, override
from gspo_env.recipes.tiny import Tiny


def write_env(path, step, reset="return 'say', {}", **methods):
    """Writes an environment `Own`, whose methods have these bodies, to a file."""
    bodies = {
        "reset(self, *, seed=None, options=None)": f"super().reset(seed=seed)\n        {reset}",
        "step(self, action)": step,
        **{f"{name}(self)": body for name, body in methods.items()},
    }
    text = "from gspo_env import TextEnv\nclass Own(TextEnv):\n"
    path.write_text(text + "".join(f"    def {n}:\n        {b}\n" for n, b in bodies.items()))


def tiny(**changes):
    """The settings of a run of the tiny model that takes seconds."""
    settings = {
        "recipe": {"hidden_size": 32, "demonstrations": 64, "imitation_steps": 40},
        "steps": 2,
        "tasks_per_step": 4,
        "eval_every": 0,
        "eval_tasks": 4,
        "rollout": {"group_size": 4},
        "tracker": "none",
    }
    return override(override(Config.from_recipe(), settings), changes)


def drawn(**changes):
    """The settings of a run of `drawn_envs.py`, of whose twenty tasks some are held out."""
    settings = {
        "recipe": {
            **{"hidden_size": 16, "layers": 1, "heads": 2},
            **{"demonstrations": 60, "imitation_steps": 40, "imitation_learning_rate": 0.02},
        },
        **{"env": "drawn_envs.py:Turns", "steps": 3, "tasks_per_step": 8},
        **{"eval_every": 10, "eval_tasks": 12},
    }
    return tiny(**{**settings, **changes})


def talks(**changes):
    """The settings of a run of `talk.py`, which has a checkpoint after each step."""
    settings = Config.from_recipe(
        Tiny(
            hidden_size=32,
            demonstrations=64,
            imitation_steps=24,
            imitation_batch=8,
            imitation_learning_rate=1e-2,
        ),
        env="talk.py:Talk",
        steps=4,
        tasks_per_step=3,
        eval_every=2,
        eval_tasks=4,
        rollout={"group_size": 4, "max_turn_tokens": 8},
        checkpoints={"save_every": 1, "keep": 9},
        learner={"warmup_steps": 2},
        tracker="none",
        output="run",
    )
    return override(settings, changes)


def sign(file):
    """Writes a changed file of a checkpoint into its manifest."""
    content, manifest = file.read_bytes(), file.with_name("manifest.json")
    tree = json.loads(manifest.read_text())
    tree["files"][file.name] = [len(content), sha256(content).hexdigest()]
    manifest.write_text(json.dumps(tree))


def timeless(history):
    """A history without times and rates."""
    return [
        (step, {k: v for k, v in m.items() if "time/" not in k and "per_second" not in k})
        for step, m in history
    ]
