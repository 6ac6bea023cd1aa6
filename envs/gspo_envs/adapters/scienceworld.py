"""ScienceWorld: `gym.make("gspo/ScienceWorld-v0", task="boil")`."""

from __future__ import annotations

from typing import Any

from gspo_env.errors import ConfigError
from gspo_envs.adapters.foreign import check_name, load
from gspo_envs.adapters.text_game import Java, JavaGameEnv, Screen

_SPLITS: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
"""The variations of each task, which only Java knows."""


class ScienceWorldEnv(JavaGameEnv):
    """An experiment of ScienceWorld; its training variations train, its test variations evaluate.

    Its reward is the increase of ScienceWorld's score, which falls to -1 if the agent spoils the
    task, and the episode then ends.

    Args:
        task: The name of a task, such as "boil".
        simplifications: Those of ScienceWorld, with commas between them: "easy" has them all.
        show_actions: Whether each observation ends with the commands that the game accepts.
        max_turns: Turns before the episode is truncated; the longest solutions take some 190.
        memory: MiB of Java's heap. Each environment has a Java process of its own.
        timeout: Seconds that one call of Java may take.

    Raises:
        ConfigError: The task or a simplification is unknown.
        MissingExtraError: ScienceWorld or Java is not installed.
    """

    interface = "scienceworld.runtime.pythonapi.PythonInterface"
    shares = False  # games of a process draw from one generator
    max_copies = 8  # so many processes of Java
    # without it, the order in which objects are listed and met differs from process to process
    java_options = ("-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2")

    def __init__(
        self,
        task: str = "find-living-thing",
        *,
        simplifications: str = "easy",
        show_actions: bool = False,
        max_turns: int = 200,
        memory: int = 512,
        timeout: float = 120.0,
    ) -> None:
        """Lists the variations."""
        constants = load("scienceworld.constants", "ScienceWorld", "scienceworld")
        check_name("ScienceWorld", task, constants.ID2TASK.values())
        self.jar, self._task, self._easy = constants.JAR_PATH, task, simplifications
        if (task, simplifications) not in _SPLITS:
            args = (self.jar, self.interface, memory, timeout, *self.java_options)
            _SPLITS[task, simplifications] = self._splits(Java.join(self, *args))
        super().__init__(
            *_SPLITS[task, simplifications],
            show_actions=show_actions,
            max_turns=max_turns,
            memory=memory,
            timeout=timeout,
        )

    def open(self, row: Any, index: int, seed: int) -> Screen:
        """Begins a variation."""
        self._row, self._game, self._commands = row, self.new_game(), ["look around"]
        return self._screen(f"{self._load(gold=False)}\n\n{self._game.step('look around')}")

    def play(self, command: str) -> Screen:
        """Takes a command."""
        self._commands.append(command)
        return self._screen(self._game.step(command))

    def actions(self) -> list[str]:
        """Returns the commands that the game accepts now."""
        return list(self._game.getValidActionObjectCombinations())

    def gold(self) -> list[str]:
        """Returns ScienceWorld's own solution, for which it plays the game again up to here."""
        self._load(gold=True)
        for command in self._commands:
            self._game.step(command)
        return list(self._game.getGoldActionSequence())

    def _splits(self, java: Java) -> list[list[dict[str, Any]]]:
        """Returns the rows of training and of evaluation."""
        try:
            with java.calls():
                game = java.game()
                known = ["easy", *game.getPossibleSimplifications().split(", ")]
                for name in filter(None, self._easy.split(",")):
                    check_name("ScienceWorld", name, known)
                if problem := game.load(self._task, 0, self._easy, False):
                    raise ConfigError(f"ScienceWorld: {problem}")
                lists = game.getVariationsTrain(), game.getVariationsTest()
                return [[{"task": self._task, "variation": n} for n in each] for each in lists]
        finally:
            java.leave()

    def _load(self, *, gold: bool) -> str:
        """Begins the game, and returns its task."""
        self._game.load(self._task, self._row["variation"], self._easy, gold)
        return str(self._game.getTaskDescription())

    def _screen(self, text: str) -> Screen:
        score, over = self._game.getScore(), self._game.getCompleted()
        return Screen(text=text, score=score, success=over and score >= 1, over=over or score < 0)
