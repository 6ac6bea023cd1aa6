"""The real package verifiers: its data and rewards reach the policy."""

from pathlib import Path

import pytest

from gspo_env.check.environment import check_env
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError
from gspo_env.seeding import HELD_OUT

pytestmark = pytest.mark.adapters


def check_rows(env):
    """The numbers of training and evaluation rows, and those that are both."""
    rows = {env.reset(seed=seed)[1]["row"] for seed in range(400)}
    held = {env.reset(seed=seed)[1]["row"] for seed in range(HELD_OUT, HELD_OUT + 200)}
    return len(rows), len(held), rows & held


GAME = """
import verifiers.v1 as vf

__all__ = ["Guesses", "GuessEnv"]

class GuessData(vf.TaskData):
    number: int

class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def tried(self, trace) -> float:
        return 0.5 * bool(trace.assistant_messages)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)

class Guesses(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for n in range(10):
            data = GuessData(prompt="Guess.", system_prompt="A number.", number=n)
            yield GuessTask(data, self.config.task)

class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        won = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                said = segment.last_reply
                guess = int(said) if said.isdecimal() or said == "six" else 0
                if guess == task.data.number:
                    won = 1.0
                    break
                segment = await interaction.turn("lower" if guess > task.data.number else "higher")
        interaction.trace.record_reward("won", won)

    async def finalize(self, task, episode):
        episode.traces[0].record_reward("fair", 0.25)
"""


class TestVerifiers:
    @pytest.fixture
    def file(self):
        pytest.importorskip("verifiers.v1")
        return str(Path(__file__).parents[1] / "support" / "vf_tasks.py")

    def make(self, taskset, **kwargs):
        return make_env("gspo/Verifiers-v0", taskset=taskset, **kwargs)

    def test_a_tasks_own_rewards_judge_the_answer_by_name_and_weight(self, file):
        env = self.make(f"{file}:Sums")
        for row in (6, 7):
            assert env.reset(seed=0, options={"row": row})[0] == f"{row} + 1 = ?"
            assert env.get_wrapper_attr("system_prompt") == "Box it."
            _, reward, terminated, _, info = env.step(f"\\boxed{{{row + 1}}}")
            assert (reward, terminated) == (2.5, True)
            assert info["reward_parts"] == {"right": 1.0, "brief": 0.5, "length": 9.0}
        env.reset(seed=0, options={"row": 6})
        assert env.step("a long and wrong answer")[1] == 0.0

    def test_the_seed_picks_the_task_and_evaluation_has_its_own(self, file):
        env = self.make(f"{file}:Sums", config={"count": 40}, held_out=0.25)
        assert check_rows(env) == (30, 10, set())

    @pytest.mark.parametrize(
        ("taskset", "message"),
        [
            ("Endless", "is infinite, give a limit"),
            ("NeedsBox", r"Boxed\.setup needs a runtime"),
            ("NeedsRun", r"Runner\.runs needs a runtime"),
            ("None_", "expected a name in"),
        ],
    )
    def test_what_needs_more_than_an_answer_is_refused(self, file, taskset, message):
        with pytest.raises(ConfigError, match=message):
            self.make(f"{file}:{taskset}")

    def test_an_infinite_taskset_is_read_up_to_its_limit_and_unknown_ids_are_named(self, file):
        env = self.make(f"{file}:Endless", limit=5, held_out=0)
        assert {env.reset(seed=seed)[1]["row"] for seed in range(60)} == set(range(5))
        with pytest.raises(ConfigError, match="'no-such-taskset' cannot be loaded"):
            self.make("no-such-taskset")
        with pytest.raises(ConfigError, match=r"cannot be loaded.*colour"):
            self.make(f"{file}:Sums", config={"colour": "red"})

    def test_it_keeps_the_contract(self, file):
        check_env(self.make(f"{file}:Sums"))

    @pytest.fixture
    def game(self, tmp_path, monkeypatch):
        """An installed taskset that exports an environment."""
        pytest.importorskip("verifiers.v1")
        name = f"guess_game_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(GAME)
        monkeypatch.syspath_prepend(tmp_path)
        return name

    def test_an_interactive_environment_talks_until_it_ends(self, game):
        env = self.make(game)
        assert env.reset(seed=0, options={"row": 6})[0] == "Guess."
        assert env.get_wrapper_attr("system_prompt") == "A number."
        assert env.step("4")[:4] == ("higher", 0.0, False, False)
        assert env.step("7")[:4] == ("lower", 0.0, False, False)
        observation, reward, terminated, _, info = env.step("6")
        assert (observation, reward, terminated) == ("", 1.75, True)
        assert info["reward_parts"] == {"won": 1.0, "tried": 0.5, "fair": 0.25, "turns": 3.0}

    def test_a_limit_ends_the_talk_and_it_is_judged_as_it_is(self, game):
        env = self.make(game, max_turns=2)
        env.reset(seed=0, options={"row": 6})
        env.step("4")
        _, reward, terminated, truncated, info = env.step("5")
        assert (reward, terminated, truncated) == (0.75, False, True)
        assert info["reward_parts"]["turns"] == 2.0

    def test_what_an_environment_raises_truncates_and_a_new_episode_begins(self, game):
        env = self.make(game)
        env.reset(seed=0, options={"row": 6})
        _, reward, terminated, truncated, info = env.step("six")
        assert (reward, terminated, truncated) == (0.0, False, True)
        assert "ValueError" in info["env_error"]
        assert env.reset(seed=0)[0] == "Guess."

    def test_an_interactive_environment_keeps_the_contract(self, game):
        check_env(self.make(game, max_turns=4))

    def test_an_environment_of_several_agents_is_refused(self, game, tmp_path):
        path = next(tmp_path.glob("guess_game_*.py"))
        judge = "    judge: vf.AgentConfig = vf.AgentConfig()\n"
        text = path.read_text().replace("    player:", f"{judge}    player:")
        path.with_name("two_players.py").write_text(text)
        with pytest.raises(ConfigError, match=r"GuessEnv has the agents \['judge', 'player'\]"):
            self.make("two_players")
