"""The real dashboard in a real browser."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from quantwatch_dashboard.launch import serving

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip
WAIT_MS = 120_000
"""Generous: CI machines are busy."""
RUN = "01JD0000000000000000000006"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHROMIUM.exists() and "CI" not in os.environ, reason=f"{CHROMIUM} is not installed"
    ),
]


@pytest.fixture
def address(demo_url: str) -> Iterator[str]:
    """The dashboard on a free port of the loopback."""
    with serving(demo_url) as found:
        yield found


@pytest.fixture
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(FLAGS))
        yield found
        found.close()


def open_page(browser: Browser, url: str, scheme: str = "light") -> tuple[Page, list[str]]:
    """Open a page and collect its console errors."""
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    errors: list[str] = []

    def note(message: ConsoleMessage) -> None:
        # Streamlit looks for its server at /run/_stcore first, then at /_stcore: no fault of ours.
        probing = "/_stcore/" in message.location.get("url", "")
        if message.type == "error" and not probing:
            errors.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    return page, errors


def settled(page: Page, selector: str) -> None:
    """Wait until a page has drawn what it shows; a failure says what it shows instead."""
    try:
        page.wait_for_selector(selector, timeout=WAIT_MS)
        page.wait_for_selector("[data-testid=stStatusWidget]", state="detached", timeout=WAIT_MS)
    except PlaywrightTimeoutError as error:
        shown = page.inner_text("body")[:2000]
        raise AssertionError(f"{selector} did not appear; the page shows:\n{shown}") from error
    page.wait_for_timeout(1_000)


def test_overview_to_run_to_token(address: str, browser: Browser, tmp_path: Path) -> None:
    """Catches what AppTest can't see: a page that does not draw, or errors in the browser."""
    page, errors = open_page(browser, address)
    settled(page, ".qw-overview")
    assert page.inner_text("h1") == "1 regression"
    page.screenshot(path=tmp_path / "overview.png")

    page.click("text=Open run →")
    settled(page, ".js-plotly-plot .heatmaplayer image")
    assert page.inner_text(".qw-what") == "layers.14.mlp.down_proj"
    assert "int8-fault" in page.inner_text(".qw-hero")
    assert page.locator(".js-plotly-plot").count() == 4
    assert page.locator("[data-testid=stException]").count() == 0
    assert f"run={RUN}" in page.url
    assert "candidate=int8-fault" in page.url
    page.screenshot(path=tmp_path / "run.png")

    page.locator(".qw-scroll.qw-top a").first.click()
    settled(page, ".qw-prompt span.at")
    assert "position=" in page.url
    assert errors == []


def test_dark_theme_and_hostile_tokens(address: str, browser: Browser, tmp_path: Path) -> None:
    """Catches prompt text that the browser executes or renders, and unreadable dark colors."""
    page, errors = open_page(browser, f"{address}/run?run={RUN}&prompt=2&metric=lens_kl", "dark")
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


def test_unreadable_database_in_the_browser(browser: Browser, tmp_path: Path) -> None:
    """Catches an error box instead of a sentence when there is no database."""
    with serving(f"sqlite:///{tmp_path}/gone.db") as found:
        page, errors = open_page(browser, found)
        settled(page, ".qw-state")

        assert "does not exist yet" in page.inner_text(".qw-state")
        assert page.locator("[data-testid=stException]").count() == 0
        assert errors == []
