"""Say a list backwards: `gspo-env train --env examples/backwards.py:Backwards --steps 30`."""

from gspo_env import TextEnv

WORDS = ["ant", "bee", "cat", "dog", "eel", "fox"]


class Backwards(TextEnv):
    """Say a list of words backwards, one word per turn."""

    system_prompt = "Say the list backwards, one word per turn."
    credit_score = "turns"  # learn from the rewards of turns, not from the outcome
    blocking = False  # step never waits, so it needs no thread

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.words = self.np_random.permutation(WORDS)[:4].tolist()
        shown = " ".join(self.words)
        return shown, {"task_key": shown}  # keeps evaluation tasks out of training

    def step(self, action):
        right = action.strip() == self.words.pop()
        done = not right or not self.words
        info = {"success": right, "episodic_reward": float(right)} if done else {}
        return "next", 0.25 * right, done, False, info

    def expert_action(self, noise=0.0):  # demonstrations for the tiny model
        slip = self.np_random.random() < noise
        return self.np_random.choice(WORDS).item() if slip else self.words[-1]
