"""What can never work is refused before PyTorch is loaded, or at least before a demonstration."""

import importlib.util
from pathlib import Path

import pytest
from support.runs import write_env

from gspo_env.cli.main import main

LOADS = "loading PyTorch"
WITHOUT_VLLM = importlib.util.find_spec("vllm") is None


@pytest.mark.parametrize(
    ("flags", "words", "loads"),
    [
        (["--output", "full"], "'full' is not empty", False),
        (["--output", "full/file/run"], "'full/file/run', because", False),
        (["--advantage", "distillation"], "teacher is 'self' and hint is ''", False),
        pytest.param(
            *(["--engine", "vllm"], "needs vLLM, which is not installed", False),
            marks=pytest.mark.skipif(not WITHOUT_VLLM, reason="vLLM is installed"),
        ),
        (["--group-size", "1"], "group_size is 1, and the estimator", True),
        (["--advantage", "gigpo", "--group-size", "1"], "group_size is 1, and the", True),
    ],
)
def test_a_training_that_can_never_work_is_refused_before_a_demonstration(
    in_folder, capsys, flags, words, loads
):
    played = "print('x', end='', file=open('played', 'a')); return 'yes'"
    write_env(Path("own.py"), "return '', 1.0, True, False, {}", expert_action=played)
    Path("own.py").write_text(
        Path("own.py").read_text().replace("expert_action(self)", "expert_action(self, noise=0.0)")
    )
    Path("full").mkdir()
    Path("full/file").touch()
    command = ["train", "--env", "own.py:Own", "--tracker", "none", *flags]
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(command)
    shown = capsys.readouterr()
    assert end.value.code == 2
    assert words in shown.err
    assert (LOADS in shown.out) == loads
    # a few episodes are played to see whether the environment gives token advantages
    assert len(Path("played").read_text() if loads else "") <= 8
    assert loads or not Path("played").exists()
    assert not Path("runs").exists()
