"""The command line: good runs finish, and bad input gets one sentence."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli_errors import refused
from support.credits import episode, group
from support.jails import run_python
from support.runs import write_env

from gspo_env.cli.evaluate import merged, print_noise, print_scores
from gspo_env.cli.help import USUAL
from gspo_env.cli.main import main, parse
from gspo_env.config import Config, read_toml
from gspo_env.credit import GroupGAE
from gspo_env.env.registration import load_agent
from gspo_env.errors import RolloutError
from gspo_env.learner import GRPO
from gspo_env.model.save import save_model
from gspo_env.registry import BUILTIN
from gspo_env.tracking.base import flatten
from gspo_env.types import Ending, Fault, StopReason

ENV = """
from gspo_env import TextEnv
class Yes(TextEnv):
    def step(self, action):
        return "", 1.0, True, False, {}
"""
TINY = [
    *("--hidden-size", "32", "--demonstrations", "64", "--imitation-steps", "4"),
    *("--steps", "2", "--tasks-per-step", "3", "--group-size", "3", "--eval-tasks", "6"),
]


pytestmark = pytest.mark.usefixtures("quick_store")


@pytest.fixture(autouse=True)
def _folder(in_folder, monkeypatch):
    """Each test runs in a new working folder."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def root(request):
    """The root of the repository."""
    return request.config.rootpath


def test_the_score_of_a_file_gives_way_to_another_estimator_and_is_named_with_another_environment(
    tmp_path, caplog
):
    (tmp_path / "run.toml").write_text('[credit]\nscore = "turns"\n')
    command = ["train", *TINY, "--config", "run.toml"]
    assert parse([*command, "--advantage", "outcome"]).resolved.credit.score == "auto"
    assert parse([*command, "--advantage", "gigpo"]).resolved.credit.score == "turns"
    assert not caplog.text
    assert parse([*command, "--env", "gspo/SQL-v0"]).resolved.credit.score == "turns"
    assert "credit.score is 'turns', as in run.toml" in caplog.text


def test_train_says_both_figures_and_evaluate_reports_its_folder(capsys, tmp_path):
    main(["train", *TINY, "--output", "out"])
    output = capsys.readouterr().out
    for words in ("after imitation", "after training", "mlflow ui"):
        assert words in output
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files >= {"config.toml", "learning_curve.png", "model", "episodes", "view.html"}
    main(["evaluate", "--model", "out", "--tasks", "5", "--samples", "4"])
    output = capsys.readouterr().out
    for word in ("success", "95 % interval", "return", "turns", "pass@4", "pass^4"):
        assert word in output
    main(["evaluate", "out", "--tasks", "5", "--temperature", "0", "--max-turn-tokens", "2"])
    greedy = capsys.readouterr().out
    main(["evaluate", "out", "--tasks", "5", "--temperature", "0", "--max-turn-tokens", "2"])
    assert capsys.readouterr().out == greedy
    main(["evaluate", "out", "--tasks", "5", "--max-turn-tokens", "2", "--show", "3"])
    output = capsys.readouterr().out
    assert output.count("read:\n  | <|im_start|>system") == 3
    assert "2 sampled" in output
    shutil.copytree("out/model", "plain", ignore=shutil.ignore_patterns("gspo_env.json"))
    plain = ["--model", "plain", "--env", "gspo/Lookup-v0"]
    main(["evaluate", *plain, "--tasks", "3", "--max-turn-tokens", "1"])
    output = capsys.readouterr().out
    assert "Of the 3 episodes in this evaluation, none succeeds" in output
    assert "--recipe imitate" in output
    main(["evaluate", "scripted", "--env", "gspo/Calculator-v0", "--tasks", "8"])
    assert "success  100.0%" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["help"], ["help", "view"]])
def test_help_is_a_command_and_what_is_printed_without_one(capsys, arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert ("--mb" if "view" in arguments else "diagnose") in shown


@pytest.mark.parametrize("env", ["gspo/Lokup-v0", "none.py:Env", "gspo/Lookup-v0:0.5 none-v0"])
def test_an_unknown_environment_is_named_before_torch_is_imported(env):
    code = "import sys; from gspo_env.cli.main import main\ntry:\n    main(sys.argv[1:])\n"
    code += "finally:\n    print('torch' in sys.modules)"
    done = run_python("-c", code, "train", "--env", *env.split())
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    assert "none" in done.stderr or "Lookup" in done.stderr


def test_a_model_that_is_nowhere_is_one_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "no model of that name in the cache" in refused(
        capsys, "train", "--model", "nowhere/at-all"
    )
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_tokenizer_or_its_chat_template_is_one_sentence(
    capsys, tmp_path, model, tokenizer
):
    model.save_pretrained(tmp_path / "bare")
    assert "has no tokenizer" in refused(capsys, "train", "--model", "bare")
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]
    silent = copy.deepcopy(tokenizer)
    silent.chat_template = None
    save_model(model, silent, tmp_path / "silent")
    assert "chat template" in refused(capsys, "train", "--model", "silent")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("(3, 0.0, False, False, {})", "step() observation is 3 of type int, expected a str"),
        ("1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_a_broken_environment_is_one_sentence_and_leaves_nothing(capsys, tmp_path, result, words):
    write_env(tmp_path / "own.py", f"return {result}")
    assert words in refused(capsys, "train", "--env", "own.py:Own")
    assert {path.name for path in tmp_path.iterdir()} <= {"own.py", "__pycache__"}


def test_an_evaluation_that_loses_every_episode_says_so():
    agent = load_agent("scripted")("gspo/Lookup-v0")
    fault = Fault(reason=StopReason.CRASH, message="its process ended", where="exit code 1")
    ending = Ending(reason=StopReason.CRASH, fault=fault)
    groups = [
        replace(group, episodes=tuple(replace(e, ending=ending) for e in group.episodes))
        for group in agent.evaluate(2, 3)
    ]
    with pytest.raises(RolloutError, match="all 6 episodes failed in their environment"):
        print_scores(groups, agent.split(2))


def test_the_noise_of_evaluations_is_worked_by_hand(capsys):
    lost = episode(9, stop=StopReason.ERROR)
    rounds = [
        [group(episode(1), episode(0)), group(episode(0), episode(1))],
        [group(episode(0), episode(0)), group(episode(0), lost)],
        [group(lost, lost), group(lost, lost)],
    ]
    print_noise(rounds)
    # 2 of 4 and 0 of 3; of the three episodes that both have, one ends otherwise
    output = capsys.readouterr().out
    assert "success of 2 evaluations 0.0% to 50.0%" in output
    assert "standard deviation 35.4 points; two differ by up to 98.0 by chance" in output
    assert "33.3% of the episodes end otherwise" in output
    print_noise(rounds[:1])
    print_noise(rounds[2:])
    assert not capsys.readouterr().out
    assert [len(g.episodes) for g in merged(rounds)] == [6, 6]


def test_an_output_that_cannot_be_written_is_one_sentence(capsys, tmp_path):
    (tmp_path / "file").write_text("in the way")
    output = refused(capsys, "train", *TINY, "--output", str(tmp_path / "file" / "out"))
    assert "cannot write to the output folder" in output
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    assert "is not empty" in refused(capsys, "train", *TINY, "--output", "full")
    assert (tmp_path / "full" / "thesis.txt").read_text() == "precious"
    assert not list(tmp_path.glob("*.db"))


def test_train_without_options_is_the_recipe_tiny():
    assert parse(["train"]).resolved == Config.from_recipe("tiny")


def test_settings_of_the_chosen_class_are_flags_by_path_and_by_last_part(tmp_path):
    flags = ["--advantage", "group_gae", "--lam", "0.9", "--loss", "grpo", "--loss.clip-low=0.1"]
    config = parse(["train", *flags, "--env-kwargs", "a=1", "--env-kwargs=b=[2]"]).resolved
    assert config.advantage == GroupGAE(lam=0.9)
    assert config.loss == GRPO(clip_low=0.1)
    assert config.env_kwargs == {"a": 1, "b": [2]}
    odd = ["a=True", "b=None", "c=false", "d=x=y", "e='q'"]
    config = parse(["train", "--env-kwargs", *odd]).resolved
    assert config.env_kwargs == {"a": True, "b": None, "c": False, "d": "x=y", "e": "q"}
    (tmp_path / "run.toml").write_text(
        "steps = 1\nseed = 5\n[advantage]\nname = 'group_gae'\nlam = 0.5\n"
    )
    again = parse(["train", "--config", "run.toml", "--scale", "none", "--seed", "9"]).resolved
    assert again.advantage == GroupGAE(lam=0.5, scale="none")
    assert (again.steps, again.seed) == (1, 9)  # flags win over the file


COMPARED = ["arm", "seeds", "first-seed", "metric", "target", "workers"]


@pytest.mark.parametrize(("command", "own"), [("train", ["resume"]), ("compare", COMPARED)])
def test_help_lists_the_usual_settings_and_those_of_the_command(capsys, command, own):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    listed = [line.split()[0] for line in shown.splitlines() if line.startswith("  --")]
    assert sorted(listed) == sorted(f"--{path.replace('_', '-')}" for path in (*USUAL, *own))
    assert shown.startswith(f"usage: gspo-env {command} ")
    assert "  --rollout.group-size INT\n        Episodes of each task, G. (default: 8)\n" in shown
    assert f"gspo-env {command} --help all" in shown
    assert "checkpoints, episodes, rollout, supply" in shown


def test_help_lists_every_setting_with_its_default_and_a_page_has_one_group(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help", "all"])
    output = capsys.readouterr().out
    for path in [*flatten(Config.from_recipe(), mappings=False), *BUILTIN, "config"]:
        assert f"--{path.replace('_', '-')} " in output
    assert "(default: 0.03)" in output
    with pytest.raises(SystemExit):
        main(["train", "--advantage", "group_gae", "--help", "advantage"])
    page = capsys.readouterr().out
    assert page.startswith("usage: gspo-env train ")
    assert "--advantage.lam" in page
    assert "--steps" not in page


def test_the_end_runs_the_handlers_of_libraries_and_frees_no_modules(tmp_path):
    lines = [
        "import atexit",
        "class Freed:",
        "    def __del__(self, show=print):",
        "        show('freed')",
        "kept = Freed()",
        "atexit.register(print, 'handled')",
        "raise KeyboardInterrupt",
    ]
    (tmp_path / "stops.py").write_text("\n".join(lines))
    done = run_python("-m", "gspo_env", "train", "--env", "stops.py:Env")
    assert (done.returncode, done.stdout) == (130, "handled\n"), done.stderr
    (tmp_path / "stops.py").write_text("\n".join(lines[:-1]) + ENV)
    done = run_python("-m", "gspo_env", "play", "stops.py:Yes")  # which imports no PyTorch
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("handled\n"), done.stdout


def test_the_version_and_the_module(capsys):
    main(["--version"])
    assert capsys.readouterr().out.startswith("gspo-env 0.")
    done = run_python("-m", "gspo_env", "envs")
    assert done.returncode == 0, done.stderr
    assert "gspo/Lookup-v0" in done.stdout


def test_a_users_own_classes_in_files_of_at_most_40_lines_train(root):
    choices = {
        "advantage": ("own_estimator.py:BestOfGroup", {"margin": 0.1}),
        "loss": ("own_loss.py:SquashedRatio", {"bound": 0.2}),
        "engine": ("own_engine.py:Plain", {}),
    }
    # the engine computes the whole sequence again for each token
    flags, tables = ["--max-turn-tokens", "6"], {}
    for kind, (choice, settings) in choices.items():
        name = str(root / "examples" / choice)
        assert len(Path(name.rpartition(":")[0]).read_text().splitlines()) <= 40
        flags += [f"--{kind}", name, *(w for k, v in settings.items() for w in (f"--{k}", str(v)))]
        tables[kind] = {"name": name, **settings}
    main(["train", *TINY, *flags, "--tracker", "none", "--output", "out"])
    saved = read_toml("out/config.toml")
    assert {kind: saved[kind] for kind in tables} == tables
