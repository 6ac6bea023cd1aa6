"""The report of runs: arms, bands, escaped texts, and a command that gives the same settings."""

import io
import json
import math
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from support.runs import tiny

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.main import main
from gspo_env.compare import stats
from gspo_env.config import Config, override, to_toml
from gspo_env.errors import OutputError
from gspo_env.health.record import RunRecord
from gspo_env.report import learning_curve
from gspo_env.report.arms import RunArm, arms_of, band
from gspo_env.report.page import cell, fenced
from gspo_env.report.plots import episodes_figure
from gspo_env.report.run_record import read_run
from gspo_env.report.run_report import write_run_report
from gspo_env.types import StopReason

EVIL = (
    "<script>alert('x')</script> | $\\frac{1}{0}$ `a` ```b``` \x1b[31m \u202e [l](http://e.com) @me"
)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A real run of two steps."""
    folder = tmp_path_factory.mktemp("real") / "run"
    small = {"recipe": {"imitation_steps": 4}, "tasks_per_step": 2, "rollout": {"group_size": 3}}
    config = tiny(**small, eval_every=1, checkpoints={"keep": 0}, output=str(folder))
    GSPOAgent(config=config).train()
    return folder


def write(folder, success, **settings):
    """Writes a run with an evaluation every 5 steps."""
    folder.mkdir(parents=True)
    config = override(Config.from_recipe(), {"eval_tasks": 100, **settings})
    (folder / "config.toml").write_text(to_toml(config))
    rows = [
        {"step": 5 * n, "time": 0, "metrics": {"eval/success": value, "eval/return": 2 * value}}
        for n, value in enumerate(success)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_run(folder)


class Tags(HTMLParser):
    """The tags, their attributes and the text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.text += data


def test_runs_that_differ_in_the_seed_are_one_arm_named_by_what_differs(tmp_path):
    runs = [
        write(tmp_path / f"{advantage}{seed}", [0.1, 0.5], seed=seed, advantage=advantage)
        for advantage in ("outcome", "gigpo")
        for seed in (0, 1, 2)
    ]
    arms = arms_of(runs)
    assert [len(arm.runs) for arm in arms] == [3, 3]
    assert "advantage outcome" in arms[0].name
    assert "advantage gigpo" in arms[1].name
    assert [arm.name for arm in arms_of(runs[:1])] == ["outcome0"]
    assert [arm.name for arm in arms_of(runs[:3])] == ["gspo/Lookup-v0"]


def test_the_band_of_one_run_is_wilsons_and_that_of_seeds_a_bootstrap(tmp_path):
    one = write(tmp_path / "0", [0.1, 0.5])
    tasks = band(arms_of([one])[0], "eval/success")
    assert tasks.kind == "tasks"
    low, high = stats.success_interval([[1.0]] * 50 + [[0.0]] * 50)
    assert (tasks.low[1], tasks.high[1]) == (low, high)
    more = [write(tmp_path / str(n), [0.1, 0.4 + n / 10, 0.9][: 2 + n % 2], seed=n) for n in (1, 2)]
    seeds = band(arms_of([one, *more])[0], "eval/success")
    assert seeds.kind == "seeds"
    assert seeds.steps.tolist() == [0, 5]  # those that all runs have
    assert np.all((seeds.low <= seeds.middle) & (seeds.middle <= seeds.high))
    assert seeds.low[1] < seeds.high[1]
    assert band(arms_of([one])[0], "no/metric") is None


def test_a_real_run_gives_pictures_a_page_that_loads_nothing_and_markdown(real, tmp_path):
    paths = write_run_report([read_run(real)], tmp_path, with_markdown=True, made_by="gspo-env")
    names = [path.name for path in paths]
    pictures = ["curves.png", "episodes.png", "credit.png", "update.png"]
    assert names == ["report.html", *pictures, "report.md"]
    page = Tags((tmp_path / "report.html").read_text())
    assert {"script", "link", "iframe", "a"} & set(page.tags) == set()
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    assert len(page.links) == len(pictures)
    assert "Best episode" in page.text
    assert "Worst episode" in page.text
    text = (tmp_path / "report.md").read_text()
    assert re.findall(r"!\[[^\]]*\]\(([\w.]+)\)", text) == pictures
    assert "gspo-env train --config config.toml" in text
    tables = re.findall(r"^\|.*\|$", text, re.MULTILINE)
    assert len({re.sub(r"\\.", "", line).count("|") for line in tables}) == 1
    assert "turn 1: reward" in text


def test_texts_of_policies_environments_and_names_do_nothing(real, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "a|b $x^2$ <img src=x onerror=alert(1)>"
    shutil.copytree(real, folder)
    for path in (folder / "episodes").glob("*.parquet"):
        table = pq.read_table(path)
        for name in ("observation", "action", "final_observation"):
            column = pa.array([EVIL] * table.num_rows, pa.string())
            table = table.set_column(table.column_names.index(name), name, column)
        pq.write_table(table, path)
    (folder / "first-environment-error.txt").write_text(EVIL)
    (folder / "failure.txt").write_text(EVIL)
    (folder / "warnings.txt").write_text(f"x: {EVIL}\n")
    write_run_report([read_run(folder)], tmp_path / "out", with_markdown=True, made_by=EVIL)
    page = Tags((tmp_path / "out" / "report.html").read_text())
    assert {"script", "a"} & set(page.tags) == set()
    assert page.tags.count("img") == 4
    assert "<script>alert('x')</script>" in page.text  # shown as text
    shown = (tmp_path / "out" / "report.md").read_text()
    assert "\x1b" not in shown + page.text
    assert "\u202e" not in shown + page.text
    outside = re.sub(r"^(`{3,})\w+\n.*?^\1$", "", shown, flags=re.MULTILINE | re.DOTALL)
    assert "```" not in outside
    assert "<script" not in outside
    assert not re.search(r"(?<!\\)\]\(http", outside)
    assert not re.search(r"(?<!\\)\$", outside)


@pytest.mark.parametrize(
    "text", [EVIL, "# head", "- item", "1. item", "a\n\n# b", "_x_ *y*", "\\|"]
)
def test_a_cell_of_markdown_is_one_line_without_markup(text):
    made = cell(text)
    assert "\n" not in made
    assert not re.search(r"(?<!\\)[|`*$\[\]]", made.replace("\\\\", ""))
    assert "<" not in made
    assert not re.match(r"[-+#]|\d+\.", made)


def test_no_text_can_end_a_block_of_code():
    made = fenced("a\n````\nb")
    assert made.startswith("`````text\n")
    assert made.endswith("\n`````")


def test_the_command_line_writes_beside_the_run_and_refuses_what_is_no_run(
    real, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    shutil.copytree(real, folder)
    monkeypatch.chdir(tmp_path)
    main(["report", str(folder), "--no-browser"])
    main(["report", str(folder.parent), "--no-browser"])
    assert (folder / "report" / "report.html").is_file()
    main(["report", str(folder), str(folder), str(real), "--no-browser", "--markdown"])
    assert "## Diagnosis of run" in (tmp_path / "report" / "report.md").read_text()
    assert "2 runs" in (tmp_path / "report" / "report.html").read_text()  # one is named twice
    with pytest.raises(OutputError, match="no runs"):
        write_run_report([], tmp_path)


def test_a_run_with_nothing_but_metrics_has_a_report(tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0, "metrics": {"eval/success": 0.5}}\n')
    paths = write_run_report([read_run(folder)], tmp_path / "out", with_markdown=True)
    assert all(path.is_file() for path in paths)


def draw(history):
    return learning_curve(RunRecord.in_progress(Config(), history), "Guess, $x$")


def test_a_learning_curve_has_success_and_return_of_training_and_evaluations():
    history = [(step, {"rollout/success": step / 10, "train/loss": 1.0}) for step in range(1, 11)]
    history += [(5, {"eval/success": 0.4, "eval/success_greedy": 0.6})]
    history += [(10, {"eval/success": 0.9, "eval/success_greedy": math.nan})]
    figure = draw(history)
    success, returns = figure.axes
    steps = [list(np.asarray(line.get_xdata())) for line in success.get_lines()]
    assert steps == [list(range(1, 11)), [5, 10], [5]]
    assert [line.get_label() for line in success.get_lines()] == [
        "training",
        "evaluation",
        "evaluation, greedy",
    ]
    assert [text.get_text() for text in returns.texts] == ["not recorded"]
    figure.savefig(image := io.BytesIO(), format="png")
    width, height = image.getvalue()[16:20], image.getvalue()[20:24]
    assert (int.from_bytes(width), int.from_bytes(height)) == (1200, 675)


def test_lines_that_coincide_are_told_apart_and_those_at_the_edge_are_visible():
    alike = {"rollout/success": 1.0, "eval/success": 1.0, "eval/success_greedy": 1.0}
    axis = draw([(n, alike) for n in range(3)]).axes[0]
    assert len({str(line.get_linestyle()) for line in axis.get_lines()}) > 1
    assert axis.get_ylim()[1] > 1.0


def test_an_empty_history_is_drawn():
    assert [len(axis.get_lines()) for axis in draw([]).axes] == [0, 0]


@pytest.mark.parametrize("steps", [1, 4])
def test_each_stop_reason_has_a_colour_and_a_label_of_its_own(steps):
    shares = {f"rollout/stop/{reason}": 1 / len(StopReason) for reason in StopReason}
    shares["rollout/success"] = 0.5
    run = RunRecord.in_progress(Config(), [(n + 1, shares) for n in range(steps)])
    axis = episodes_figure([RunArm(name="a", runs=(run,))]).axes[0]
    colours = {tuple(np.ravel(stack.get_facecolor())) for stack in axis.collections}
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert len(colours) == len(labels) == len(StopReason)
    assert labels == [reason.value for reason in StopReason]
