"""Pages in a real browser: opened, waited for, and checked for what everybody must be able to read."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import (
    BrowserContext,
    ConsoleMessage,
    Page,
    ViewportSize,
    expect,
    sync_playwright,
)
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

CHROMIUM = Path(os.environ.get("QUANTWATCH_CHROMIUM", "/usr/bin/chromium"))
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
    # A name of elsewhere that leads here, as DNS rebinding makes it.
    "--host-resolver-rules=MAP evil.example 127.0.0.1",
)  # fmt: skip
WAIT_MS = 180_000
"""Generous: CI machines are busy. It bounds every single wait, never the speed."""
MARKS = [pytest.mark.browser, pytest.mark.slow]
DESK: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
MOST_TABS = 600
Browse = Callable[..., tuple[Page, list[str]]]
"""Opens an address in a page of its own: the fixture `browse`. With the page comes the list of its
console errors."""
DESCRIBED_MS = 20_000
_STATE = """() => {
    const app = document.querySelector("[data-testid=stApp]");
    const hides = (element) => {
        const style = getComputedStyle(element), box = element.getBoundingClientRect();
        const why = [
            style.display === "none" && "display: none",
            style.visibility !== "visible" && style.visibility,
            (box.width === 0 || box.height === 0) && `${box.width} x ${box.height}`,
        ].filter(Boolean);
        const tag = element.cloneNode(false).outerHTML.slice(0, 300);
        return why.length ? [`${tag} (${why.join(", ")})`] : [];
    };
    const hidden = (selector) => {
        let element = document.querySelector(selector);
        if (!element) return "not there";
        const found = [];
        for (; element; element = element.parentElement) found.push(...hides(element));
        return found;
    };
    return {
        "document": `${document.readyState}, ${document.visibilityState}, ${navigator.onLine ? "online" : "offline"}`,
        "window": `${innerWidth} x ${innerHeight}`,
        "app": app ? app.cloneNode(false).outerHTML.slice(0, 300) : "not there",
        "hides the title": hidden("h1"),
        "hides the chart": hidden(".js-plotly-plot"),
        "hides the heatmap": hidden(".js-plotly-plot .heatmaplayer image"),
        "text": document.body.innerText.slice(0, 1000),
        "its text": (document.querySelector("[data-testid=stMain]") || document.body).textContent.slice(0, 500),
    };
}"""
_SCRIPT = Path(__file__).with_name("accessibility.js")


def require_chromium() -> None:
    """Skip where there is no browser; in CI that is a failure."""
    if CHROMIUM.exists():
        return
    words = f"{CHROMIUM} is not installed (Debian's package chromium)"
    if "CI" in os.environ:
        pytest.fail(words)
    pytest.skip(words)


@contextmanager
def profile() -> Iterator[BrowserContext]:
    """Run headless Chromium with one profile: what pages have in common is loaded once."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=list(FLAGS), timeout=WAIT_MS
        )
        found = browser.new_context()
        # Every wait: Playwright's own 30 s are too short for the first page on a busy machine.
        found.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        yield found
        browser.close()


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
    page.wait_for_timeout(400)
    assert page.locator("[data-testid=stException]").count() == 0


def described(page: Page, picture: Path) -> str:
    """Return what a page was when a wait for it ended in vain, and take its picture.

    The words answer what `hidden` leaves open: which element hides the first chart and title, whether
    the script still runs, whether the server is still connected, what never arrived.
    """
    page.screenshot(path=picture, full_page=True, timeout=DESCRIBED_MS)
    under_way = [each.url for each in page.requests() if each.existing_response is None]
    told = [f"{each.type}: {each.text}" for each in page.console_messages()]
    thrown = [str(each) for each in page.page_errors()]
    about = {
        "address": page.url, "picture": str(picture), **page.evaluate(_STATE),
        "without an answer": under_way, "console": told[-20:], "thrown": thrown,
    }  # fmt: skip
    return "\n".join(f"{name}: {value}" for name, value in about.items())


def unreadable(page: Page) -> list[str]:
    """Return texts with less contrast than AA asks for, against what really lies behind them."""
    found: list[str] = _checks(page).evaluate("qwCheck.contrast()")
    return found


def unnamed(page: Page) -> list[str]:
    """Return pictures, table headers and controls that a screen reader can't name."""
    found: list[str] = _checks(page).evaluate("qwCheck.alternatives()")
    return found


def unreachable(page: Page) -> list[str]:
    """Go through the page with the Tab key; return what it never reaches, or nobody sees focused."""
    _checks(page).evaluate("qwCheck.beforeTabbing()")
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        if not page.evaluate("qwCheck.afterTab()"):
            break
    found: list[str] = page.evaluate("qwCheck.afterTabbing()")
    return found


def sideways(page: Page) -> list[str]:
    """Return what makes the page wider than the window, if anything does."""
    page.wait_for_timeout(300)
    widths = page.eval_on_selector(
        "[data-testid=stMain]", "e => [e.scrollWidth, e.clientWidth, innerWidth]"
    )
    body = page.evaluate("document.documentElement.scrollWidth")
    return [] if max(widths[0], body) <= min(widths[1:]) else [f"{widths}, {body}"]


def _checks(page: Page) -> Page:
    page.evaluate(_SCRIPT.read_text())
    return page
