"""The page of `gspo-env view` in a real Chromium."""

import math
from dataclasses import replace

import pytest
from support.turns import episode, turn

from gspo_env.episodes import read_episodes
from gspo_env.episodes.writer import to_table
from gspo_env.runs import Effect, Run, write_page
from gspo_env.runs.effects import OWN, write_effects
from gspo_env.types import Group, Message, Prompt, StepInfo, Task

pytestmark = pytest.mark.browser

HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(1)>'


def keep(folder, step, *episodes):
    import pyarrow.parquet as pq

    (folder / "episodes").mkdir(parents=True, exist_ok=True)
    group = Group(task=episodes[0].task, episodes=episodes)
    path = folder / "episodes" / f"{step:06d}-train.parquet"
    pq.write_table(to_table(step, "train", {0: group}, {}), path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step}, "time": 0, "metrics": {{"rollout/return": {step}}}}}\n')


def start(page, address):
    page.goto(address)
    page.wait_for_selector("html[data-ready]")


def count(page):
    return str(page.locator("output").inner_text())


def test_the_page_of_a_run_opens_from_disk_filters_and_shows_an_episode(page, run):
    kept = read_episodes(run)
    start(page, f"{(run / 'view.html').as_uri()}#summary")
    assert page.locator("h1").inner_text() == "run"
    assert page.locator("canvas").count() >= 5
    page.click("nav >> text=Episodes")
    assert count(page) == f"{len(kept)} of {len(kept)} episodes"
    page.select_option("label:has-text('Played in') select", "train")
    page.wait_for_selector(f"output:has-text('18 of {len(kept)}'), output:has-text('12 of')")
    page.locator("[role=option]").first.click()
    page.keyboard.press("1")
    name = page.locator("h2").inner_text().split()[-1]
    (record,) = [e for e in kept if e.episode == name]
    page.wait_for_selector("article")
    assert page.locator("article").count() == record.num_turns
    assert record.turns[0].observation in page.locator("article").first.inner_text()
    assert "ended by the environment" in page.locator(".end").inner_text()
    page.fill("#search", "no task is called so")
    page.wait_for_selector("text=No episode is like this.")


def test_the_page_opens_at_the_latest_group_whose_episodes_differ(page, tmp_path):
    for step, successes in enumerate(((True, True), (True, False, True), (False, False))):
        keep(tmp_path, step, *(episode(turn(), success=won) for won in successes))
    start(page, write_page(Run.open(tmp_path), tmp_path / "view.html").as_uri())
    page.wait_for_selector("tbody")
    marks = page.locator("thead .mark").all_inner_texts()
    assert marks[:3] == ["✓", "✗", "✓"]
    rows = page.locator("[role=option]")
    assert ["".join(rows.nth(i).locator(".mark").all_inner_texts()) for i in range(3)] == [
        *("✗✗", "✓✗✓", "✓✓")
    ]
    assert rows.nth(1).get_attribute("aria-selected") == "true"
    rows.nth(1).locator(".mark").nth(2).click()
    page.wait_for_selector("h2:has-text('train-1-0-2')")


def test_the_header_names_what_was_trained_and_all_of_the_time(page, run):
    (run / "summary.md").write_text("x\n\nDuration: 1:02:03.\n\n    gspo-env train --steps 2\n")
    start(page, f"{write_page(Run.open(run), run / 'header.html').as_uri()}#summary")
    header = page.locator(".about").inner_text().replace("\n", " ")
    for words in (
        *("gspo/Lookup-v0", "tiny", "2 steps of 3 tasks with 3 episodes each, learning"),
        *("Time 1 h 2 min", "Command gspo-env train --steps 2"),
    ):
        assert words in header
    assert "rollouts" in page.locator(".facts").inner_text()


def test_a_token_shows_its_exact_id_and_values(page, run):
    record = next(e for e in read_episodes(run, phases=["train"]) if e.trained)
    start(page, f"{(run / 'view.html').as_uri()}#tokens={record.episode}")
    page.wait_for_selector(".t")
    ids = [i for t in record.turns for i in (*t.prompt_ids, *t.action_ids)]
    assert page.locator(".t").count() == len(ids)
    sampled = page.locator(".t:not(.read)")
    assert sampled.count() == sum(len(t.action_ids) for t in record.turns)
    sampled.nth(0).hover()
    tip = page.locator(".tip").inner_text()
    assert f"id\n{record.turns[0].action_ids[0]}" in tip
    for name in ("advantage", "engine log-probability", "trainer log-probability", "ratio"):
        assert name in tip
    page.locator(".flow").focus()
    page.keyboard.press("ArrowRight")
    at = len(record.turns[0].prompt_ids) + 1
    assert f"id\n{ids[min(at, len(ids) - 1)]}" in page.locator(".tip").inner_text()
    before = sampled.nth(0).get_attribute("style")
    page.click("text=entropy")
    assert sampled.nth(0).get_attribute("style") != before


def test_tokens_show_the_weights_that_sampled_them(page, tmp_path):
    of_two = turn(action_ids=(3, 4, 5), logprobs=(-1.0,) * 3, weights_versions=((4, 2), (5, 1)))
    keep(tmp_path, 5, episode(of_two), episode(turn(weights_version=4)))
    address = write_page(Run.open(tmp_path), tmp_path / "view.html").as_uri()
    start(page, f"{address}#tokens=train-5-0-0")
    page.click("label:has-text('weights')")
    assert "Weights of steps 4 to 5." in page.locator(".note").inner_text()
    sampled = page.locator(".t:not(.read)")
    styles = [sampled.nth(i).get_attribute("style") for i in range(3)]
    assert styles[0] == styles[1] != styles[2]
    for i, version in enumerate((4, 4, 5)):
        sampled.nth(i).hover()
        assert f"weights\nof step {version}" in page.locator(".tip").inner_text()
    page.goto(f"{address}#tokens=train-5-0-1")
    page.wait_for_selector("h2:has-text('train-5-0-1')")
    sampled.nth(0).hover()
    assert "weights\nof step 4" in page.locator(".tip").inner_text()
    assert page.locator("label:has-text('weights')").count() == 0


def test_other_settings_on_two_kept_batches_are_a_table_for_each_and_nothing_without(
    page, tmp_path
):
    run = tmp_path / "kept"
    for step in (1, 2, 3):
        keep(run, step, episode(turn()), episode(turn()))
    opened = Run.open(run)
    start(page, f"{write_page(opened, tmp_path / 'none.html').as_uri()}#summary")
    assert "whatif" not in page.locator(".summary").inner_text()
    for step in (2, 3):
        (run / f"batches/step-{step:06d}").mkdir(parents=True)
    start(page, f"{write_page(opened, tmp_path / 'kept.html').as_uri()}#summary")
    assert "gspo-env whatif kept --step 3" in page.locator(".summary").inner_text()
    assert page.locator(".whatif").count() == 0
    own = Effect(
        norm=0.5,
        cosine=1.0,
        clipped=0.125,
        turned_tokens=0.0,
        turned_turns=0.0,
        best=0.25,
        worst=-0.5,
        outcome=0.0,
    )
    other = replace(own, cosine=-0.25, turned_tokens=0.75, best=math.nan, outcome=-0.01)
    for step in (2, 3):
        arms = {OWN: own, f"loss=cispo, {HOSTILE}": other}
        write_effects(run / f"batches/step-{step:06d}", arms)
    start(page, f"{write_page(opened, tmp_path / 'both.html').as_uri()}#summary")
    tables = page.locator(".whatif table")
    assert tables.locator("caption").all_inner_texts() == ["Update of step 2", "Update of step 3"]
    rows = tables.nth(1).locator("tbody tr")
    assert rows.nth(0).locator("td").all_inner_texts() == [
        *("1.000", "0.5", "12.5%", "0.0%", "0.0%", "+0.25", "-0.5", "0")
    ]
    assert rows.nth(1).locator("td").all_inner_texts() == [
        *("-0.250", "0.5", "12.5%", "75.0%", "0.0%", "", "-0.5", "-0.01")
    ]
    assert rows.nth(1).locator("th").inner_text() == f"loss=cispo, {HOSTILE}"
    assert "One batch is one sample" in page.locator(".whatif").inner_text()
    page.set_viewport_size({"width": 380, "height": 800})
    body = page.locator("body")
    assert body.evaluate("body => body.scrollWidth <= innerWidth")  # the tables scroll alone


def test_hostile_text_is_shown_as_text(page, tmp_path):
    hostile = turn(
        text=f"<think>{HOSTILE}</think>{HOSTILE}", observation=HOSTILE, info=StepInfo(agent=HOSTILE)
    )
    bad = episode(
        hostile,
        turn(text=f'<tool_call>{{"name": "{HOSTILE}"'),
        task=Task(env_id=HOSTILE, seed=1, options={"x": HOSTILE}),
        prompt=Prompt(
            system=HOSTILE, messages=(Message(role="assistant", content=HOSTILE, name=HOSTILE),)
        ),
        error=HOSTILE,
        final_observation=HOSTILE,
    )
    keep(tmp_path, 1, bad)
    (tmp_path / "config.toml").write_text(HOSTILE)
    (tmp_path / "warnings.txt").write_text(HOSTILE)
    (tmp_path / "episodes" / "tokens.json").write_text(f'{{"3": "{"<b>bold</b>"}"}}')
    start(page, write_page(Run.open(tmp_path), tmp_path / "view.html").as_uri())
    page.goto(f"{(tmp_path / 'view.html').as_uri()}#conversation=train-1-0-0")
    page.wait_for_selector("article")
    page.click("text=Unfold all")
    assert page.locator("article").first.inner_text().count('<script>alert("x")') >= 4
    page.keyboard.press("2")
    assert "<b>bold</b>" in page.locator(".flow").inner_text()
    page.keyboard.press("3")
    page.wait_for_selector("tbody")
    assert page.locator("#app script, #app img, #app b >> text=bold").count() == 0


def test_shared_and_forked_sequences_are_shown_as_such(page, tmp_path):
    parents = (None, 0, 0, None)
    keep(tmp_path, 1, episode(*(turn(parent=parent) for parent in parents)))
    start(
        page,
        f"{write_page(Run.open(tmp_path), tmp_path / 'v.html').as_uri()}#conversation=train-1-0-0",
    )
    page.wait_for_selector("article")
    forks = page.locator(".fork").all_inner_texts()
    assert forks == ["Continues turn 1: the sequence forks.", "A new token sequence begins here."]
    page.keyboard.press("2")
    heads = page.locator(".flow h3").all_inner_texts()
    assert heads == [
        f"Sequence {n} of 3: turns {turns}" for n, turns in enumerate(("1, 2", "1, 3", "4"), 1)
    ]
    (shared,) = page.locator(".shared summary").all_inner_texts()
    assert shared.startswith("5 tokens of turn 1 are shared")


def test_side_by_side_counts_all_episodes_of_a_task_and_shows_the_first(page, tmp_path):
    keep(tmp_path, 1, *(episode(turn()) for _ in range(20)))
    keep(tmp_path, 2, *(episode(turn()) for _ in range(2)))
    address = write_page(Run.open(tmp_path), tmp_path / "view.html").as_uri()
    start(page, f"{address}#attempts=train-1-0-0")
    page.wait_for_selector(".attempts table")
    text = page.locator(".attempts p").inner_text()
    assert text == "20 episodes of this task, and 2 of other steps; the first 16 are shown."
    assert page.locator(".attempts thead button").count() == 16
