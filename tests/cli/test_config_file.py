"""An error about a config file names all of its faults with their lines."""

from __future__ import annotations

import pytest

from gspo_env.cli.main import parse
from gspo_env.errors import ConfigError

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


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(command, text, *flags):
    with open("run.toml", "w") as file:
        file.write(text)
    with pytest.raises(ConfigError) as error:
        parse([command, "--config", "run.toml", *flags])
    return str(error.value)


def test_all_faults_of_a_file_are_named_in_the_order_of_their_lines():
    head, *faults = refusal("train", FAULTY).splitlines()
    assert head == "run.toml has 5 faults:"
    assert [line.split(";")[0] for line in faults] == [
        "  line 2: unknown field 'stepz'",
        "  line 3: steps is 'many'",
        "  line 6: learning_rate is -1.0",
        "  line 9: loss is 'gspx'",
        "  line 12: unknown field 'lerner'",
    ]


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        ("train", "steps = 3\nseed = -4\n", "run.toml, line 2: seed is -4; expected"),
        ("train", "learner.learning_rate = 'x'", "run.toml, line 1: learner.learning_rate is 'x'"),
        ("train", "[loss]\nname = 'gspo'\nclip_lo = 1", "line 3: unknown field loss.'clip_lo'"),
        ("compare", "seed = 1\n[compare]\nseedz = 3", "run.toml, line 3: unknown field compare."),
        ("compare", "[compare]\nseeds = [\n1]", "run.toml, line 2: compare.seeds is [1]"),
        ("train", "steps = 3\nsteps", "run.toml is not valid TOML: "),
    ],
)
def test_one_fault_is_one_sentence_with_its_line(command, text, words):
    message = refusal(command, text)
    assert words in message
    assert "\n" not in message


def test_a_fault_of_a_flag_beside_a_sound_file_is_not_blamed_on_the_file():
    assert "run.toml" not in refusal("train", "steps = 3", "--learning-rate", "x")
