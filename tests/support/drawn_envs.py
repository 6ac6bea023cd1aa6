"""Environments of twenty tasks that the seed draws; `stepped` has the tasks that were played."""

from support.small_env import Small


class Turns(Small):
    """Rewards each turn."""

    num_tasks = 20
    credit_score = "turns"
    stepped = []  # noqa: RUF012

    def __init__(self, bonus=0.0):
        super().__init__()
        self.bonus = bonus

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.task = seed, self.draw()
        return f"task {self.task}", {"task_key": self.task}

    def draw(self):
        return int(self.np_random.integers(20))

    def step(self, action):
        self.stepped.append((self.seed >= 10**9, self.task))
        return super().step(action)

    def reward(self, action):
        return self.bonus + (action == "yes")

    def expert_action(self, noise=0.0):
        return "yes" if self.np_random.random() > 0.5 else "no"


class Last(Turns):
    """Has the same task keys, other draws, and gives an outcome only."""

    gives_outcome = True
    credit_score = "outcome"
    stepped = []  # noqa: RUF012

    def draw(self):
        return 19 - int(self.np_random.integers(20))

    def step(self, action):
        observation, _, *ends, _ = super().step(action)
        return observation, 0.0, *ends, {"episodic_reward": float(action == "no")}
