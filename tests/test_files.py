"""A stranger's folder makes no command read or write outside of it, or fill the memory."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.cli_errors import refused
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gspo_env.cli.main import main
from gspo_env.config import CheckpointConfig, Config, to_toml
from gspo_env.episodes.records import read_episodes
from gspo_env.episodes.schema import episode_files, read_tokens, schema
from gspo_env.errors import OutputError
from gspo_env.files import check_folder, parse_toml, read_file, remove, write_file
from gspo_env.model.save import make_output
from gspo_env.redaction import write_text
from gspo_env.runs import Run, write_page
from gspo_env.training.checkpoints import Checkpoints
from gspo_env.training.resume import damage

PRECIOUS = "what the user would miss"


@pytest.fixture
def run(in_folder):
    """The folder of a run that may be a stranger's, beside a file and a folder of the user."""
    Path("precious").mkdir()
    Path("precious/file").write_text(PRECIOUS)
    folder = Path("run")
    folder.mkdir()
    line = {"step": 1, "time": 0, "metrics": {"eval/success": 0.5, "rollout/return": 0.5}}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "config.toml").write_text(to_toml(Config.from_recipe()))
    (folder / "tracking").mkdir()
    (folder / "tracking/run.json").write_text("{}")
    (folder / "episodes").mkdir()
    with Checkpoints(folder, CheckpointConfig()) as store:
        assert store.save({"step": 1, "best": {"step": 1}}, [("a", torch.ones(2))])
    return folder


def test_runs_that_begin_at_the_same_moment_have_a_folder_each(in_folder):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(16) as pool:
            folders = list(pool.map(lambda _: make_output("", "x"), range(300)))
    finally:
        sys.setswitchinterval(interval)
    assert sorted(folders) == sorted(Path("runs", f"x-{n}") for n in range(1, 301))


def test_a_tokenizer_that_finds_the_disk_full_costs_its_checkpoint_alone(run, caplog):
    with Checkpoints(run, CheckpointConfig()) as store:
        tokenizer = Tokenizer(WordLevel())  # written in Rust, it raises Exception
        assert not store.try_write("the checkpoint", lambda: tokenizer.save("/dev/full"))
        assert "cannot write the checkpoint: No space left on device" in caplog.text
        with pytest.raises(ZeroDivisionError):
            store.try_write("the checkpoint", lambda: 1 / 0)


def test_a_run_that_failed_at_its_start_gives_its_folder_to_the_next(run):
    with pytest.raises(OutputError, match="is not empty"):
        make_output("run", "")
    with Checkpoints(run, CheckpointConfig()) as store, pytest.raises(ValueError, match="wrong"):  # noqa: SIM117
        with store.report_failure():
            raise ValueError("wrong")
    for name in ("checkpoints/step-000001", "checkpoints/best", "metrics.jsonl", "episodes"):
        with pytest.raises(OutputError, match="is not empty"):  # something was recorded
            make_output("run", "")
        remove(run / name)
    (run / "thesis.txt").write_text(PRECIOUS)
    with pytest.raises(OutputError, match="is not empty"):
        make_output("run", "")
    (run / "thesis.txt").unlink()
    with Checkpoints(run, CheckpointConfig()), pytest.raises(OutputError, match="still running"):
        make_output("run", "")
    assert make_output("run", "") == run
    assert [path.name for path in run.rglob("*")] == ["checkpoints", "lock"]
    (run / "metrics.jsonl").touch()
    assert make_output("run", "") == run  # of a full disk, which had no room for an error
    (run / "config.toml").write_text("seed = 1")
    with pytest.raises(OutputError, match="is not empty"):  # of a killed run
        make_output("run", "")


COMMANDS = {
    "view": ["view", "run", "--no-browser"],
    "diagnose": ["diagnose", "run"],
    "resume": ["train", "--resume", "run"],
    "sync": ["sync", "run"],
    "compare": ["compare", "--output", "run", "--arm", "advantage=outcome,returns_to_go"],
}
LINKS = {
    "view.html": "precious/file",
    "report": "precious",
    "episodes/tokens.json": "precious/file",
    "tracking/calls.jsonl": "precious/file",
    "checkpoints/step-000002": "precious",
    "checkpoints/step-000001/state.json": "precious/file",
    "checkpoints/.step-000002.9999999.part": "precious",
    "checkpoints/lock": "precious/file",
    "warnings.txt": "/dev/zero",
    "model": "precious",
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_link_in_the_folder_of_a_run_is_refused_and_nothing_is_written(
    capsys, run, command, link
):
    place = run / link
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(os.path.abspath(LINKS[link]))
    assert f"'{place}' is a link; expected only files" in refused(capsys, *COMMANDS[command])
    assert [p.name for p in Path("precious").iterdir()] == ["file"]
    assert Path("precious/file").read_text() == PRECIOUS


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_in_the_folder_of_a_run_is_refused(capsys, run, command):
    os.mkfifo(run / "warnings.txt")
    assert "is not a regular file" in refused(capsys, *COMMANDS[command])


DAMAGE = {
    "metrics.jsonl": b'{"step": 1, "time": 0, "metrics": ' + b"[" * 100_000 + b"\n",
    "metrics.jsonl ": b'{"step": [], "time": {}, "metrics": {"a": {}}}\n[]\n1\n{"step": 1}\n',
    "metrics.jsonl  ": b"".join(
        b'{"step": %d, "time": 0, "metrics": {"eval/success": %de308, "rollout/return": -1e308}}\n'
        % (n, (-1) ** n)
        for n in range(20)
    ),
    "config.toml": b"seed = " + b"9" * 5000,
    "tracking/calls.jsonl ": b'{"name": "x", "arguments": 5, "after": "a"}\n',
    "tracking/none.json": b'{"id": 5, "metrics": -7, "calls": "x"}',
    "tracking/run.json": b"[" * 100_000,
    "tracking/calls.jsonl": b"[" * 100_000 + b"\n",
    "episodes/tokens.json": b"[" * 100_000,
    "checkpoints/step-000001/manifest.json": b'{"format": 1, "files": ' + b'{"a":' * 90_000,
}


QUICK = [(command, [name]) for command in ("view", "diagnose", "resume") for name in DAMAGE]


@pytest.mark.parametrize(
    ("command", "names"),
    [
        *QUICK,
        *(pytest.param("sync", [name], marks=pytest.mark.slow) for name in DAMAGE),
    ],
)
def test_a_damaged_file_of_a_run_is_no_traceback(run, capsys, command, names):
    for name in names:
        (run / name.strip()).write_bytes(DAMAGE[name])
    with contextlib.suppress(SystemExit):
        main(COMMANDS[command])
    assert "Traceback" not in capsys.readouterr().err


def test_a_huge_file_of_a_checkpoint_is_not_read(run):
    folder = run / "checkpoints/step-000001"
    with (folder / "state.json").open("r+b") as file:
        file.truncate(1 << 42)
    assert re.fullmatch(r"state.json has 4398046511104 bytes; expected \d+", damage(folder))


def test_dots_in_texts_of_settings_are_no_long_keys():
    dots = "a.b" * 99
    texts = f"'{dots}'", rf'"{dots}\"{dots}"', f'"""\n"{dots}"""""', f"'''{dots}'''"
    values = ", ".join([*texts, *["0.5"] * 99])
    assert parse_toml(f"d.e.f = [{values}] # {dots}")["d"]["e"]["f"][4:] == [0.5] * 99


def test_a_checkpoint_without_its_facts_is_one_sentence(run, capsys):
    said = refused(capsys, *COMMANDS["resume"])
    assert "state.json' is not of a run: state.config is None; start a new run" in said


def test_links_above_the_folder_and_to_the_best_checkpoint_are_allowed(run):
    Path("link").symlink_to("run")
    main(["view", "link", "--no-browser"])
    assert (run / "view.html").is_file()
    best = run / "checkpoints/best"
    best.unlink()
    best.symlink_to("../../precious")
    with pytest.raises(OutputError, match="best' is a link"):
        check_folder(Path("link"))


def test_a_link_that_appears_later_is_replaced_and_not_followed(run):
    for write in (write_text, lambda path, text: write_file(run, path.name, _writer(text))):
        place = run / "config.toml"
        place.unlink()
        place.symlink_to(os.path.abspath("precious/file"))
        write(place, "new")
        assert place.read_text() == "new"
        assert not place.is_symlink()
    assert Path("precious/file").read_text() == PRECIOUS
    (run / "episodes").rmdir()
    (run / "episodes").symlink_to(os.path.abspath("precious"))
    with pytest.raises(OSError, match="is a link"):
        write_file(run, "episodes/tokens.json", _writer("x"))


def _writer(text):
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    "name", ["..", "../precious/file", "/etc/passwd", "a/../../precious/file", ""]
)
def test_a_name_that_leaves_the_folder_is_refused(run, name):
    with pytest.raises(OSError, match="is not a plain relative name"):
        read_file(run, name, 100)
    with pytest.raises(OSError, match="has more than 3 bytes"):
        read_file(run, "config.toml", 3)


@pytest.mark.parametrize("name", ["/dev/zero", "../../../precious/file", "best/state.json"])
def test_a_manifest_names_files_of_its_own_folder(run, name):
    folder = run / "checkpoints/step-000001"
    (folder / "best").symlink_to(".")
    manifest = json.loads((folder / "manifest.json").read_text())
    size, digest = manifest["files"]["state.json"]
    manifest["files"][name] = [size, digest]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "cannot be read: it is" in damage(folder)


def test_a_file_of_episodes_does_not_unpack_to_more_than_the_bounds(run, caplog, monkeypatch):
    monkeypatch.setattr("gspo_env.episodes.schema._MAX_UNPACKED", 1 << 26)
    indices = pa.array([0] * 20_000, pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, ["x" * 50_000])  # a gigabyte
    path = run / "episodes/000001-train.parquet"
    pq.write_table(pa.table({"observation": column}), path, store_schema=False)
    assert path.stat().st_size < 1 << 20
    assert len(read_episodes(run)) == 0
    assert "unpacks to more than" in caplog.text
    monkeypatch.setattr("gspo_env.episodes.schema._MAX_UNPACKED", 100)
    assert episode_files(run) == []


HOSTILE = """
from gspo_env.cli.main import main
rescore = ["rescore", "run", "--rewards", "score.py:size", "--data", "rows.jsonl"]
for command in (["view", "run", "--no-browser"], rescore):
    try:
        main(command)
    except SystemExit:
        pass
print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize(
    ("columns", "make", "rows"),
    [
        (("observation", "action", "final_observation"), lambda: ["x" * 300_000], 4000),
        (("error", "agent", "options", "task_key", "tools"), lambda: ["x" * 99_999], 4000),
        (("final_observation",), lambda: ["x" * 300_000_000], 2),
        (("prompt_ids",), lambda: np.full(20_000_000, 50_000, np.int32), 1),
        (("clipped",), lambda: np.full(40_000_000, True), 1),
        (("advantages", "ratios", "entropies"), lambda: pa.nulls(9_000_000, pa.float32()), 1),
    ],
    ids=["texts", "other texts", "one text", "ids", "flags", "nothing"],
)
def test_a_small_file_of_episodes_takes_little_memory_in_view_and_rescore(run, columns, make, rows):
    write_turn(run)
    path = run / "episodes/000001-train.parquet"
    table, value = pq.read_table(path).take([0] * rows), pa.array(make())
    if rows == 1:
        column = pa.ListArray.from_arrays(pa.array([0, len(value)], pa.int32()), value)
    else:
        column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), value)
    for name in columns:
        table = table.set_column(table.schema.get_field_index(name), name, column)
    pq.write_table(table, path, store_schema=False, compression="zstd")
    assert path.stat().st_size < 50_000
    Path("rows.jsonl").write_text('{"prompt": "x"}\n' * 20)
    Path("score.py").write_text("def size(attempt):\n    return len(attempt.text)\n")
    command = [sys.executable, "-c", HOSTILE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "is damaged and left out: it unpacks to more than" in " ".join(done.stderr.split())
    assert int(done.stdout.split()[-2]) < 500_000  # kibibytes


def write_turn(run, **row):
    """Writes a file with one turn, whose other values are empty."""
    row = {"episode": "train-1-0-0", "phase": "train", "stop_reason": "terminated", "turn": 0} | row
    for field in schema():
        kind = str(field.type)
        empty = [] if "list" in kind else {"string": "", "bool": False}.get(kind, 0)
        row.setdefault(field.name, None if field.nullable else empty)
    table = pa.Table.from_pylist([row], schema=schema())
    pq.write_table(table, run / "episodes/000001-train.parquet")


def test_a_file_of_huge_texts_has_no_part_of_the_page(run, caplog, monkeypatch):
    monkeypatch.setattr("gspo_env.runs.page._MAX_PART", 1 << 20)
    write_turn(run, observation="x" * (1 << 20))
    main(["view", str(run), "--no-browser"])
    assert "is left out of the page" in caplog.text


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("options", text) for text in ("nope", "[1]", "7", '"ab"', "[" * 100_000)),
        *(("messages", text) for text in ("nope", "7", "[1]", '[{"role": 7}]', "[" * 100_000)),
        *(("stop_reason", "\x1b[31m"), ("seed", -1)),
    ],
)
def test_a_damaged_episode_is_one_sentence_for_rescore(run, capsys, column, value):
    Path("rows.jsonl").write_text('{"prompt": "x"}\n' * 20)
    Path("score.py").write_text("def size(attempt):\n    return len(attempt.text)\n")
    write_turn(run, **{column: value})
    args = ["rescore", str(run), "--rewards", "score.py:size", "--data", "rows.jsonl"]
    assert "the kept episode 'train-1-0-0' is damaged" in refused(capsys, *args)


def test_a_file_of_no_episodes_has_no_part_of_the_page(run, tmp_path):
    pq.write_table(schema().empty_table(), run / "episodes/000001-train.parquet")
    assert write_page(Run.open(run), tmp_path / "page.html").exists()


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"x": 1}', "nope"])
def test_texts_of_tokens_that_are_no_table_are_left_out(run, caplog, text):
    (run / "episodes/tokens.json").write_text(text)
    assert read_tokens(run) == {}
    assert "is damaged" in caplog.text


def test_a_run_of_ones_own_is_read_and_resumed_as_before(run, capsys):
    shutil.rmtree(run / "tracking")
    (run / "wandb").mkdir()
    (run / "wandb/latest-run").symlink_to("offline-run-1")
    check_folder(run)
    main(["diagnose", "run"])
    main(["view", "run", "--no-browser"])
    assert "Wrote run/view.html" in capsys.readouterr().out
