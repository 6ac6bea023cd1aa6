"""A real Chromium: the system's if there is one, else the one that Playwright has installed."""

import shutil

import pytest
from support.runs import tiny

from gspo_agents.gspo import GSPOAgent

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("view") / "run"
    small = {"recipe": {"imitation_steps": 60}, "tasks_per_step": 3, "rollout": {"group_size": 3}}
    GSPOAgent(config=tiny(**small, eval_every=1, output=str(folder))).train()
    return folder


@pytest.fixture(scope="module")
def chromium(run):  # Playwright's loop runs in this thread: train before, and no test of others
    from playwright.sync_api import sync_playwright

    system = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=system,
            args=["--no-sandbox"],  # a container has no user namespaces
        )
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page that must say nothing in the console."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(20_000)
    opened = context.new_page()
    said: list[str] = []
    opened.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    yield opened
    context.close()
    assert said == []
