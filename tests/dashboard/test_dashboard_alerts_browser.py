"""Alerts and comparisons in a real browser: from the list to the story, from a run to a pair."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright
from tests.dashboard.invented_actions import furnish
from tests.dashboard.invented_episodes import write_ended
from tests.dashboard.test_dashboard_browser import (
    CHROMIUM,
    FLAGS,
    RUN,
    WAIT_MS,
    pytestmark,  # noqa: F401 - pytest reads it here, too
    settled,
    watched,
)

from quantwatch_dashboard.launch import serving


@pytest.fixture(scope="module")
def address(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The dashboard of a database with an alert that fires and one that is over."""
    folder = tmp_path_factory.mktemp("alerts")
    shutil.copy(filled, folder / "quantwatch.db")
    url = f"sqlite:///{folder}/quantwatch.db"
    write_ended(url, furnish(url))
    with serving(url, WAIT_MS / 1000) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=list(FLAGS), timeout=WAIT_MS
        )
        yield found
        found.close()


def test_from_the_list_to_a_silence(address: str, browser: Browser) -> None:
    """Catches what AppTest can't see: a form that is not filled, a press that is lost, a story
    that does not draw."""
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    errors = watched(page)
    page.goto(f"{address}/alerts?state=open")
    settled(page, ".qw-cards")
    assert page.evaluate("document.body.scrollWidth <= innerWidth")
    page.get_by_role("link", name="output-kl").click()
    settled(page, ".qw-story")
    assert page.locator(".qw-story li").count() == 1

    page.get_by_text("Silence …").click()
    page.get_by_label("Why, for the others").fill("new calibration data")
    # At once, without leaving the field first: the comment and the press come together.
    page.get_by_role("button", name="Silence", exact=True).click()
    expect(page.locator(".qw-knows")).to_contain_text("silenced by")
    expect(page.locator(".qw-story")).to_contain_text("new calibration data")
    page.get_by_role("button", name="End it now").click()
    expect(page.locator(".qw-said", has_text="The silence has ended")).to_be_visible()
    assert errors == []
    page.close()


def test_from_a_run_to_a_pair(address: str, browser: Browser) -> None:
    """Catches a link that loses the run, and a swap that the address does not know."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="dark")
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    errors = watched(page)
    page.goto(f"{address}/run?run={RUN}")
    page.get_by_role("link", name="compare with …").click()
    settled(page, ".heatmaplayer image")
    assert f"run_b={RUN}" in page.url
    assert "too few prompts to tell: 4" in page.inner_text(".qw-versus")
    page.get_by_role("button", name="Swap").click()
    page.wait_for_url(f"**run_a={RUN}**")
    assert page.locator("[data-testid=stException]").count() == 0
    assert errors == []
    page.close()
