"""The real dashboard in a real browser."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from quantwatch_dashboard.launch import serving

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip
WAIT_MS = 180_000
"""Generous: CI machines are busy. It bounds every single wait, never the speed."""
RUN = "01JD0000000000000000000006"
OpenPage = Callable[..., tuple[Page, list[str]]]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHROMIUM.exists() and "CI" not in os.environ, reason=f"{CHROMIUM} is not installed"
    ),
]


@pytest.fixture(scope="module")
def address(filled: Path) -> Iterator[str]:
    """The dashboard on a free port of the loopback: one server, which starts once and only reads."""
    with serving(f"sqlite:///{filled}", WAIT_MS / 1000) as found:
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


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Open pages in a profile of their own, each with the list of its console errors."""
    profiles = []

    def opened(url: str, scheme: Literal["light", "dark"] = "light") -> tuple[Page, list[str]]:
        profile = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
        profiles.append(profile)
        # Every wait: Playwright's own 30 s are too short for the first page on a busy machine.
        profile.set_default_timeout(WAIT_MS)
        page = profile.new_page()
        errors = watched(page)
        page.goto(url)
        return page, errors

    yield opened
    for profile in profiles:
        profile.close()


def watched(page: Page) -> list[str]:
    """Return the list to which a page's console errors will be added."""
    errors: list[str] = []

    def note(message: ConsoleMessage) -> None:
        # Streamlit looks for its server at /run/_stcore first, then at /_stcore: no fault of ours.
        probing = "/_stcore/" in message.location.get("url", "")
        if message.type == "error" and not probing:
            errors.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: errors.append(str(error)))
    return errors


def settled(page: Page, selector: str) -> None:
    """Wait until a page has drawn what it shows; a failure says what it shows instead."""
    try:
        page.wait_for_selector(selector)
        page.wait_for_selector("[data-testid=stStatusWidget]", state="detached")
    except PlaywrightTimeoutError as error:
        shown = page.inner_text("body")[:2000]
        raise AssertionError(f"{selector} did not appear; the page shows:\n{shown}") from error
    page.wait_for_timeout(1_000)


def test_overview_to_run_to_token(address: str, open_page: OpenPage, tmp_path: Path) -> None:
    """Catches what AppTest can't see: a page that does not draw, or errors in the browser."""
    page, errors = open_page(address)
    settled(page, ".qw-overview")
    assert page.inner_text("h1") == "1 regression"
    page.screenshot(path=tmp_path / "overview.png")

    page.click("text=Open run →")
    settled(page, ".js-plotly-plot .heatmaplayer image")
    assert page.inner_text(".qw-what") == "layers.14.mlp.down_proj"
    assert "int8-fault" in page.inner_text(".qw-hero")
    # That of one token over the layers is drawn when it is opened.
    assert page.locator(".js-plotly-plot").count() == 5
    assert page.locator("[data-testid=stException]").count() == 0
    assert f"run={RUN}" in page.url
    assert "candidate=int8-fault" in page.url
    page.screenshot(path=tmp_path / "run.png")

    point = page.locator(".js-plotly-plot:has(.heatmaplayer) .scatterlayer .point").nth(5)
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_url(re.compile("layer=(layers|embedding)"))

    page.locator('.qw-scroll.qw-top a[href*="token="]').first.click()
    settled(page, ".qw-prompt .qw-at")
    assert "token=" in page.url
    assert errors == []


def test_dark_theme_and_hostile_tokens(address: str, open_page: OpenPage, tmp_path: Path) -> None:
    """Catches prompt text that the browser executes or renders, and unreadable dark colors."""
    page, errors = open_page(f"{address}/run?run={RUN}&prompt=2&metric=lens_kl", "dark")
    settled(page, ".qw-prompt")
    settled(page, ".heatmaplayer image")

    assert "<script>alert(1)</script>" in page.inner_text(".qw-prompt")
    assert page.locator(".qw-prompt script").count() == 0
    ticks = json.dumps(
        page.locator(".xaxislayer-above text").all_text_contents(), ensure_ascii=False
    )
    assert "<script>" in ticks
    background = page.eval_on_selector(".stApp", "e => getComputedStyle(e).backgroundColor")
    assert background == "rgb(16, 19, 26)"
    page.screenshot(path=tmp_path / "dark.png")
    assert errors == []


def test_unreadable_database_in_the_browser(open_page: OpenPage, tmp_path: Path) -> None:
    """Catches an error box instead of a sentence when there is no database."""
    with serving(f"sqlite:///{tmp_path}/gone.db", WAIT_MS / 1000) as found:
        page, errors = open_page(found)
        settled(page, ".qw-state")

        assert "does not exist yet" in page.inner_text(".qw-state")
        assert page.locator("[data-testid=stException]").count() == 0
        assert errors == []
