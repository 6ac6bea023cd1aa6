"""The page of a run: what it holds, and what it never holds."""

import base64
import hashlib
import json
import re
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st
from support.cli_errors import refused
from support.turns import episode, turn

from gspo_env.cli.main import main
from gspo_env.episodes.writer import to_table
from gspo_env.redaction import _LOOKS, MARK, redact_text
from gspo_env.runs import Run, write_page
from gspo_env.runs.page import make_index, read_parts
from gspo_env.types import Group, Task

HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(1)>'


def write_run(folder, steps=3, text="hello", group=4):
    (folder / "episodes").mkdir(parents=True, exist_ok=True)
    for step in range(steps):
        write_step(folder, step, text, group)
    (folder / "config.toml").write_text(f'env = "test"\n# {text}')
    return folder


def write_step(folder, step, text, group=4):
    episodes = tuple(
        episode(
            *[turn(text=text, observation=text)] * (1 + g % 3),
            task=Task(env_id=text, seed=step, options={"name": text}),
            outcome=float(g),
            success=bool(g % 2),
            error=text,
            final_observation=text,
        )
        for g in range(group)
    )
    table = to_table(step, "train", {0: Group(task=episodes[0].task, episodes=episodes)}, {})
    pq.write_table(table, folder / "episodes" / f"{step:06d}-train.parquet")
    (folder / "episodes" / "tokens.json").write_text(json.dumps(dict.fromkeys(range(6), text)))
    with (folder / "metrics.jsonl").open("a") as file:
        line = {"step": step, "time": 0, "metrics": {f"rollout/{text}": 1.0, "rollout/return": 0.5}}
        file.write(json.dumps(line) + "\n")


def data_of(page):
    found = re.findall(r'<script type="text/plain" id="([\w.-]+)">([\w+/=]*)</script>', page)
    return {name: json.loads(zlib.decompress(base64.b64decode(data))) for name, data in found}


def test_the_page_knows_the_steps_whose_batches_are_kept(tmp_path):
    run = write_run(tmp_path / "run")
    for name in ("step-000002", "step-000010", ".step-000011.7.part"):
        (run / "batches" / name).mkdir(parents=True)
    opened = Run.open(run)
    assert json.loads(make_index(opened, []))["batches"] == [2, 10]


def test_no_text_of_a_policy_or_an_environment_is_part_of_the_html(tmp_path):
    run = write_run(tmp_path / "run", text=HOSTILE)
    page = write_page(Run.open(run), tmp_path / "page.html").read_text()
    data = data_of(page)
    assert HOSTILE in json.dumps(data["000000-train.0"]).replace('\\"', '"')
    for part in ("alert(", "onerror", 'img src="x'):
        assert part not in page
    # elements: the data, and one script
    assert page.count("<script") == page.count("</script>") == len(data) + 1


def test_the_page_runs_only_its_own_script_and_loads_nothing(tmp_path):
    page = write_page(Run.open(write_run(tmp_path / "run")), tmp_path / "page.html").read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for kind, source in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    outside = set(re.findall(r"https?://[\w./-]+", page))
    assert all("w3.org" in address or "github.com" in address for address in outside), outside


def test_the_index_has_a_value_of_each_column_for_each_episode(tmp_path):
    run = write_run(tmp_path / "run", steps=2, group=70)
    data = data_of(write_page(Run.open(run), tmp_path / "page.html").read_text())
    index = data["index"]
    assert isinstance(index, dict)
    assert {len(values) for values in index["episodes"].values()} == {140}
    assert index["blocks"] == [f"00000{step}-train.{n}" for step in (0, 1) for n in (0, 1, 2)]
    assert data.keys() == {"index", *index["blocks"]}
    block = data[index["blocks"][index["episodes"]["block"][100]]]
    assert isinstance(block, dict)
    assert "train-1-0-30" in block["episode"]


def test_a_page_that_would_be_too_large_leaves_out_steps_in_between(tmp_path):
    run = write_run(tmp_path / "run", steps=9, text="x")
    index = json.loads(make_index(Run.open(run), read_parts(run, 1)))
    assert sorted({*index["episodes"]["step"]}) == [0, 8]
    assert index["left_out"] == 7


def test_a_metric_of_a_step_that_was_run_twice_has_its_last_value(tmp_path, caplog):
    lines = [
        {"step": 1, "time": 0, "metrics": {"a": 1.0}},
        {"step": 2, "time": 0, "metrics": {"a": 2.0}},
        {"step": 1, "time": 0, "metrics": {"a": 3.0, "b": 4.0}},
    ]
    text = "\n".join(["{broken", *map(json.dumps, lines), '{"step": 9, "metr'])
    (tmp_path / "metrics.jsonl").write_text(text)
    series = Run.open(tmp_path).series
    points = {
        name: [*zip(s.steps.tolist(), s.values.tolist(), strict=True)] for name, s in series.items()
    }
    assert points == {"a": [(1, 3.0), (2, 2.0)], "b": [(1, 4.0)]}
    assert "a line of metrics.jsonl is damaged" in caplog.text


def test_a_file_whose_episodes_have_other_ids_and_a_nested_line_are_left_out(tmp_path, caplog):
    run = write_run(tmp_path / "run", steps=2)
    path = run / "episodes" / "000000-train.parquet"
    table = pq.read_table(path)
    place = table.schema.get_field_index("episode")
    strange = pa.array(["\x1b[31mstrange"] * table.num_rows)
    pq.write_table(table.set_column(place, "episode", strange), path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    page = write_page(Run.open(run), tmp_path / "view.html")
    assert "train" in page.read_text()
    assert "'\\x1b[31mstrange' is not an id of an episode" in caplog.text
    assert "a line of metrics.jsonl is damaged" in caplog.text


def test_a_run_in_which_nothing_can_be_written_says_which_option_names_another_place(
    tmp_path, capsys
):
    run = write_run(tmp_path / "run", steps=1)
    (run / "view.html").mkdir()  # stands for a disk that is read-only
    assert "written, named with --out" in refused(capsys, "view", str(run), "--no-browser")
    main(["view", str(run), "--no-browser", "--out", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").is_file()


@given(
    st.lists(
        st.text(max_size=8)
        | st.sampled_from(
            [
                *("sk-" + "a1" * 9, "AKIA" + "A1" * 8, "Bearer abcdefg1", "https://me:pw@host"),
                *("ghp_" + "a" * 20, "?key=abc", "-----BEGIN PRIVATE KEY-----x", "basic ", "eyJ"),
            ]
        )
    ).map(" ".join)
)
def test_the_fast_search_for_secrets_finds_what_the_whole_one_finds(text):
    assert redact_text(text) == _LOOKS.sub(MARK, text)
