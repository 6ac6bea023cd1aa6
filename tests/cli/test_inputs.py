"""What people type: each gives what was meant, or one sentence before anything is trained."""

import os
import shlex
import subprocess
import sys
import threading

import pytest
from support.cli_errors import refused
from support.jails import run_python
from support.runs import write_env

from gspo_env.cli.main import main, parse
from gspo_env.errors import ConfigError

pytestmark = pytest.mark.usefixtures("in_folder")

ARMS = ["--arm", "gamma=1,0.9", "--seeds", "1", "--pilot"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--seed", str(2**64)], "expected a number less than 9223372036854775808"),
        (
            ["evaluate", "--model", "scripted", "--seed", str(10**30)],
            "seed is 1000000000000000000000000000000; expected a number less than 92",
        ),
        *(
            (f"evaluate --model scripted {flag}", "a scripted agent samples nothing")
            for flag in ("--seed 3", "--seed 0", "--temperature 0", "--engine vllm")
        ),
        (
            "capture --model scripted --env gspo/Lookup-v0 --out x --temperature 0",
            "samples nothing",
        ),
        ("play --temperature 0", "temperature is 0.0, and no model plays; expected --model"),
        ("play --max-turn-tokens 3", "max_turn_tokens is 3, and no model plays; expected --model"),
        ("evaluate runs/a --temperature nan", "--temperature is 'nan'; expected a valid number"),
        ("evaluate runs/a --show -1", "show is -1; expected a number greater than or equal to 0"),
        ("play --max-turn-tokens -1", "--max-turn-tokens is -1; expected a number"),
        ("play gspo/Lookup-v0 --model ./nowhere", "there is no folder './nowhere'"),
        ("train foo", "'foo' belongs to no option; `gspo-env train --help` lists all"),
        ("evaluate runs/a runs/b", "'runs/b' belongs to no option"),
        ("evaluate --tsks 3", "there is no option --tsks; perhaps you mean --tasks"),
        ("doctor --model x", "there is no option --model; expected `gspo-env doctor MODEL`"),
        ("view --folder=x", "there is no option --folder=x; expected `gspo-env view FOLDER`"),
        ("evaluate --tasks=abc", "--tasks is 'abc'; expected a valid integer"),
        ("evaluate --tasks --seed 3", "--tasks has no value"),
        ("evaluate --temperature hot", "--temperature is 'hot'; expected a valid number"),
        ("evaluate --model-dtype fp8", "expected '', 'auto', 'float32', 'bfloat16' or 'float16'"),
        ("evaluate --env-kwargs x", "'x' is not KEY=VALUE, such as hops=4"),
        ("capture", "model is ''; expected --model, see gspo-env capture --help"),
        ("capture --model scripted --env gspo/Lookup-v0", "out is ''; expected --out"),
        ("capture --model scripted --out x", "expected one of --env, --program"),
        (
            "capture --model scripted --env gspo/Story-v0 --episodes 2 --keep 'nope > 1' --out x",
            "none of 2 episodes meets; expected a condition on reward, success, turns",
        ),
        ("train --advantage distillation", "teacher is 'self' and hint is ''; expected a"),
        *(
            (["train", "--env", "gspo/Dialogue-v0", "--env-kwargs", argument], words)
            for argument, words in (
                ("domain=hotels", "domain is 'hotels'; expected orders, bookings, or the module:"),
                ("tasks=list.json", "the domain 'orders' draws its own; expected your own domain"),
                ("early_answer=x", "early_answer is 'x', expected a number from 0 to 1"),
            )
        ),
        ("capture --model scripted --env gspo/Lokup-v0 --out x", "Lookup-v0"),
        ("serve", "the model is ''; expected the folder of a run or a hub id"),
        ("train --recipe imitate", "the recipe 'imitate' makes none; expected a model"),
        ("train --advantage grpo", "--loss grpo --advantage outcome --advantage.scale std"),
        ("train --conversations x --model m", "to select one, add --recipe imitate"),
        ("train --env-kwargs hops=abc", "hops is 'abc', expected a whole number or two"),
        ("train --temperature inf", "temperature is 'inf'; expected a valid number"),
        ("train --model ./nowhere", "there is no folder './nowhere'"),
        ("train --learner.bf16 true", "it is called model_dtype"),
        ("compare --arm group_size=2,1", "group_size is 1, and the estimator"),
        (["compare", "--metric", "nope", *ARMS], "metric is 'nope'; expected a metric"),
        (["compare", "--metric", "eval/succ", *ARMS], "such as eval/success"),
        ("compare --arm advantag=outcome", "no setting 'advantag'; perhaps you mean adva"),
        ("train --steps three", "--steps is 'three'; expected a valid integer"),
        ("train --group-size 1000.0", "--rollout.group-size is 1000.0; expected a valid integer"),
        ("compare --arm seed=1e3,2", "seed is 1000.0; expected a valid integer"),
        ("train --score nope", "--credit.score is 'nope'; expected 'auto', 'turns'"),
        ("train --model", "--model has no value"),
        ("train --steps 1 2", "--steps is 1 2; expected one value"),
        ("train --strict maybe", "--strict is 'maybe'; expected a valid boolean"),
        ("train --env ''", "--env is ''; expected a name, or no --env for the default"),
        ("evaluate --model ''", "--model is ''; expected a name"),
        ("train --resume=", "--resume is ''"),
        ("train --advantage outcom", "mean outcome? expected one of: "),
        ("train --learning-rate -1", "learning-rate is -1; expected a number greater than 0"),
        ("train --config none.toml", "cannot read the config file 'none.toml'"),
        ("train --conversations '~nobody9/a'", "cannot read the conversations '~nobody9/a'"),
        (["train", "--env-kwargs", "hops=" + "[" * 10**5], "is not a JSON value"),
        (["train", "--env-kwargs", "hops=" + "(" * 10**5], "hops is '((("),
        (["compare", "--arm", "gamma=" + "[" * 10**5], "gamma is '[[["),
        ("train --env-kwargs hops", "'hops' is not KEY=VALUE"),
        ("train --env-kwargs hopps=3", "hopps"),
        ("train --env-kwargs 'hops=[3,'", "is not a JSON value"),
        ("train --clip-low 3", "--loss.clip-low is 3; expected a number less than 1"),
        ("train --advantage outcome --gamma 0.9", "which takes scale, ddof, base"),
        ("train --advantage outcome --score sum", "'sum', which the estimator 'outc"),
        ("train --advantage turn_plus_outcome --score turns", "does not use"),
        ("train --help los", "there is no section 'los'; expected one of: all, check"),
        ("train --beta=0.1", "it is called loss.kl_coef"),
        ("train --lora-dropout 0.1", "no setting 'lora_dropout': dropout is off, because"),
        ("play gspo/Nope-v0", "Nope-v0"),
        *((["diagnose", *folder], "") for folder in ([], ["nowhere"])),
        ("diagnose .", "has no metrics.jsonl; expected the folder of a run"),
        ("trein", "did you mean train?"),
        ("evaluate", "expected one: a folder, a hub id or 'scripted'"),
        ("evaluate runs/a --model scripted", "expected one: a folder, a hub id or"),
        ("play --seed -1", "seed is -1"),
        *((["sync", *folder], "a run that was tracked") for folder in ([], ["nowhere"], ["."])),
        *((["view", *more, "--no-browser"], "") for more in ([], ["nowhere"], [".", "--mb", "0"])),
        ("report runs/a", "`gspo-env view RUN` shows one run, MLflow compares many"),
        ("serve ./none --host example.org", "there is no key"),
        ("serve ./none --port 70000", "port is 70000"),
        ("serve ./none --temperature -1", "temperature is -1"),
        ("serve ./none --engine nothing", "nothing"),
    ],
)
def test_an_input_that_cannot_be_meant_is_one_sentence_at_once(capsys, tmp_path, arguments, words):
    arguments = shlex.split(arguments) if isinstance(arguments, str) else arguments
    assert words in refused(capsys, *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a\0b", "runs/\udc80"])
def test_an_output_folder_whose_name_no_file_can_have_is_refused_before_it_is_made(
    capsys, monkeypatch, tmp_path, name
):
    monkeypatch.chdir(tmp_path)
    flags = ["--recipe.imitation-steps", "1", "--recipe.demonstrations", "16", "--tracker", "none"]
    words = refused(capsys, "train", *flags, "--output", name)
    assert "cannot write to the output folder" in words
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["doctor", "--nope"], ["evaluate", "--tasks", "x"]])
def test_an_option_that_a_command_does_not_take_ends_it_with_code_2(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert arguments[1] in capsys.readouterr().err


def test_the_example_of_the_help_for_arguments_works():
    assert parse(["train", "--env-kwargs", "hops=4"]).resolved.env_kwargs == {"hops": 4}
    main(["envs", "--check", "gspo/Lookup-v0", "--env-kwargs", "hops=4"])


def test_a_name_before_the_flag_of_the_check_shows_the_right_form(capsys):
    for arguments in (["a:B", "--check"], ["a:B"]):
        assert "expected `gspo-env envs --check a:B`" in refused(capsys, "envs", *arguments)


def test_an_environment_that_never_ends_passes_the_check_with_a_warning(capsys, tmp_path):
    write_env(tmp_path / "own.py", "return 'b', 1.0, False, False, {}")
    main(["envs", "--check", "own.py:Own"])
    output = capsys.readouterr().out
    assert "passes all checks, but:" in output
    assert "BAD ending: No episode of the check ended by itself" in output
    main(["envs", "--check", "gspo/Lookup-v0"])
    assert "Warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "body",
    [
        "1 / 0",
        "{}['x']",
        "raise SystemExit(3)",
        "raise OSError(5)",
        "__import__('json').loads('{')",
    ],
)
@pytest.mark.parametrize(
    "command", [["train"], ["envs", "--check"], ["evaluate", "--model", "scripted"]]
)
def test_a_constructor_that_raises_is_one_sentence_with_its_line(capsys, tmp_path, command, body):
    (tmp_path / "own.py").write_text(
        "from gspo_env import TextEnv\nclass Own(TextEnv):\n    def __init__(self):\n"
        f"        {body}\n"
    )
    flag = [] if command[-1] == "--check" else ["--env"]
    output = refused(capsys, *command, *flag, "own.py:Own")
    assert "(own.py:4 in __init__)." in output


def test_a_limit_on_turns_that_is_text_is_named_with_its_class(capsys, tmp_path):
    step = "return 'b', 1.0, True, False, {}"
    write_env(tmp_path / "own.py", step, __init__="super().__init__(max_turns='4')")
    output = refused(capsys, "envs", "--check", "own.py:Own")
    assert "Own: max_turns is '4', expected at least 1." in output


def test_a_check_of_an_environment_that_does_not_close_says_so(capsys, tmp_path):
    write_env(tmp_path / "own.py", "return 'b', 1.0, True, False, {}", close="1 / 0")
    assert "ZeroDivisionError" in refused(capsys, "envs", "--check", "own.py:Own")


def test_a_file_in_another_encoding_is_named_and_one_with_a_mark_is_read(capsys, tmp_path):
    (tmp_path / "latin.toml").write_bytes("# \u00fcber\nseed = 1".encode("latin-1"))
    assert "latin.toml is not in UTF-8" in refused(capsys, "train", "--config", "latin.toml")
    (tmp_path / "mark.toml").write_bytes(b"\xef\xbb\xbfseed = 5")
    assert parse(["train", "--config", "mark.toml"]).resolved.seed == 5


def test_a_comparison_into_the_folder_of_a_run_is_refused(capsys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    output = refused(capsys, "compare", "--output", "run", *ARMS)
    assert "'run' is not empty and holds no comparison" in output
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.toml"]


def test_vllm_that_is_not_installed_is_said_before_the_model_is_made(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'gspo-env[vllm]'" in refused(capsys, "train", "--engine", "vllm")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["train", "--help"], ["envs"]])
def test_a_reader_that_closes_the_output_gets_no_traceback(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    pipes = {"capture_output": False, "stdout": writer, "stderr": subprocess.PIPE}
    done = run_python("-m", "gspo_env", *arguments, **pipes)
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert "BrokenPipeError" not in done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("exec gspo-env envs 0<&- 1>&- 2>err", ""),
        ("exec gspo-env envs >/dev/full 2>err", "cannot be written, since no space is left"),
        (
            "mkfifo err; cat <err >said & ulimit -f 0; exec gspo-env envs >out 2>err",
            "cannot be written, since the file would be too large",
        ),
        (
            "rmdir ../here; exec gspo-env train --env own.py:Env 2>../err",
            "folder does not exist any more",
        ),
    ],
)
def test_streams_and_folders_that_are_closed_full_or_gone_get_no_traceback(
    tmp_path, monkeypatch, command, words
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here" if "rmdir" in command else tmp_path)
    command = command.replace("gspo-env", f"{shlex.quote(sys.executable)} -m gspo_env")
    done = subprocess.run(command, shell=True, stdout=subprocess.DEVNULL)
    said = (tmp_path / ("said" if "mkfifo" in command else "err")).read_text()
    assert done.returncode == (2 if words else 0), said
    assert words in said
    assert "Traceback" not in said
    assert said.count("\n") == bool(words)


TINY = ["--hidden-size", "16", "--heads", "2", "--layers", "1", "--tracker", "none"]
NO_OPTIMIZER = "def make(weights, lr, weight_decay):\n    return None\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lora-rank", "4", "--lora-targets", "nope"], "lora_targets has nope"),
        (["--optimizer", "own.py:make"], "which returned NoneType"),
        (["--optimizer", "own.py:nope"], "expected a name in own.py, such as: make"),
        (["--lora-rank", "4", "--optimizer", "own.py:nope"], "expected a name in own.py"),
        (
            ["--tracker", "mlflow", "--tracking-uri", "http://127.0.0.1:9"],
            "which MLflow cannot open",
        ),
    ],
)
def test_what_only_training_needs_is_tried_before_the_folder_is_made(
    capsys, tmp_path, arguments, words
):
    (tmp_path / "own.py").write_text(NO_OPTIMIZER)
    flags = ["--demonstrations", "16", "--imitation-steps", "1", "--steps", "1"]
    assert words in refused(capsys, "train", *TINY, *flags, *arguments)
    assert not (tmp_path / "runs").exists()


def test_a_name_without_a_folder_fails_at_once_where_the_hub_does_not_answer(capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: 1 / 0)
    output = refused(capsys, "train", "--model", "nofolder", "--tracker", "none")
    assert "there is no folder 'nofolder'" in output
    assert "its hub does not answer" in output


FAULTY = """# a comment
stepz = 3
steps = "many"

[learner]
learning_rate = -1

[loss]
name = "gspx"
clip_low = 0.1

[lerner]
a = [
  1,
]
b = 2
"""


def refusal(command, text, *flags):
    with open("run.toml", "w") as file:
        file.write(text)
    with pytest.raises(ConfigError) as error:
        parse([command, "--config", "run.toml", *flags])
    return str(error.value)


def test_all_faults_of_a_file_are_named_in_its_order():
    head, *faults = refusal("train", FAULTY).splitlines()
    assert head == "run.toml has 5 faults:"
    assert [line.split(";")[0] for line in faults] == [
        "  unknown field 'stepz'",
        "  steps is 'many'",
        "  learner.learning_rate is -1",
        "  loss is 'gspx'",
        "  unknown field 'lerner'",
    ]


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        ("train", "steps = 3\nseed = -4\n", "run.toml: seed is -4; expected"),
        ("train", "learner.learning_rate = 'x'", "run.toml: learner.learning_rate is 'x'"),
        ("train", "[loss]\nname = 'gspo'\nclip_lo = 1", "run.toml: unknown field loss.'clip_lo'"),
        ("compare", "seed = 1\n[compare]\nseedz = 3", "run.toml: unknown field compare."),
        ("compare", "[compare]\nseeds = [\n1]", "run.toml: compare.seeds is [1]"),
        ("train", "steps = 3\nsteps", "run.toml is not valid TOML: "),
    ],
)
def test_one_fault_is_one_sentence_with_its_path(command, text, words):
    message = refusal(command, text)
    assert words in message
    assert "\n" not in message


def test_a_fault_of_a_flag_beside_a_sound_file_is_not_blamed_on_the_file():
    for flags in (("--learning-rate", "x"), ("--recipe", "nope"), ("--loss", "gspx")):
        assert "run.toml" not in refusal("train", "steps = 3", *flags)


def _write_later(path, data):
    """Starts a thread that writes to a pipe when somebody reads it."""
    writer = threading.Thread(target=path.write_bytes, args=(data,))
    writer.start()
    return writer


@pytest.mark.parametrize("flags", [("--config",), ("--recipe", "tiny", "--conversations")])
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_neither_an_endless_device_nor_a_pipe_without_a_writer_is_read(
    capsys, tmp_path, flags, kind, monkeypatch
):
    monkeypatch.setattr("gspo_env.given_file._PATIENCE", 0.1)
    os.mkfifo(tmp_path / "pipe")
    path = "/dev/zero" if kind == "device" else str(tmp_path / "pipe")
    words = "has more than" if kind == "device" else "is a pipe to which nothing writes"
    message = refused(capsys, "train", *flags, path)
    assert f"{path!r}: {words}" in message


def test_a_config_comes_from_a_pipe_and_its_faults_name_it(capsys, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for data in (b"seed = 5\n", b"\nsead = 5\n"):
        writer = _write_later(tmp_path / "pipe", data)
        if data == b"seed = 5\n":
            assert parse(["train", "--config", str(tmp_path / "pipe")]).resolved.seed == 5
        else:
            assert "pipe: unknown field 'sead'" in refused(
                capsys, "train", "--config", str(tmp_path / "pipe")
            )
        writer.join()


def test_a_file_with_many_faults_is_refused_with_the_first_ones():
    message = refusal("train", "\n".join(f"key_{n} = {n}" for n in range(3000)))
    assert "has 3000 faults:" in message
    assert message.count("unknown field") == 20
