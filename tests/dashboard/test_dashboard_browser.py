"""Every page in a real browser: it draws without an error, and everybody can read and operate it."""

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from tests.dashboard.browsing import (
    DESK,
    MARKS,
    PHONE,
    WAIT_MS,
    Browse,
    settled,
    sideways,
    unnamed,
    unreachable,
    unreadable,
)
from tests.dashboard.conftest import Site
from tests.dashboard.invented_service import GOING
from tests.dashboard.pages import menu

from quantwatch_dashboard.launch import serving

pytestmark = MARKS
ADDRESS = {"overview": ""}
"""The first page has none of its own."""
DRAWN = {"overview": ".qw-overview", "run": ".heatmaplayer image", "compare": ".heatmaplayer image"}
"""What is drawn last; other pages are there with their title."""
INSIDE = {
    "one alert": ("alerts?alert={alert}", ".qw-story"),
    "deliveries": ("alerts?show=deliveries", "h1"),
    "a run under way": (f"run?run={GOING}", ".qw-progress"),
    "an unknown run": ("run?run=nobody", ".qw-state"),
    "settings": ("operations?show=settings&section=endpoint+ops", "h1"),
}
"""What a page shows at other addresses: the address, and what is drawn there."""


def darken(page: Page) -> None:
    """Let the reader's machine turn dark; the page follows without a reload."""
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        "getComputedStyle(document.querySelector('.stApp')).colorScheme == 'dark'"
    )
    page.wait_for_timeout(600)  # Plotly draws anew


@pytest.mark.parametrize("name", menu())
def test_every_page(name: str, site: Site, browse: Browse) -> None:
    """Catches what AppTest can't see: a page that does not draw, or errors in the browser; grey on
    grey in either theme; what only a mouse reaches, or nobody names; a page wider than a phone."""
    page, errors = browse(f"{site.address}/{ADDRESS.get(name, name)}")
    settled(page, DRAWN.get(name, "h1"))
    found = {"light": unreadable(page), "names": unnamed(page), "keyboard": unreachable(page)}
    darken(page)
    found["dark"] = unreadable(page)
    page.set_viewport_size(PHONE)
    found["phone"] = sideways(page)

    assert {what: trouble for what, trouble in found.items() if trouble} == {}
    assert errors == []


@pytest.mark.parametrize(("address", "drawn"), INSIDE.values(), ids=INSIDE)
def test_every_page_inside(address: str, drawn: str, site: Site, browse: Browse) -> None:
    """Catches the same in what only a link, a tab or an unlucky hour shows."""
    page, errors = browse(f"{site.address}/{address.format(alert=site.alert)}")
    settled(page, drawn)
    found = {"light": unreadable(page), "names": unnamed(page)}
    page.set_viewport_size(PHONE)
    found["phone"] = sideways(page)
    page.set_viewport_size(DESK)
    darken(page)
    found["dark"] = unreadable(page)

    assert {what: trouble for what, trouble in found.items() if trouble} == {}
    assert errors == []


BAD = """
<html lang="en"><body class="stApp" style="background: #eee"><main data-testid="stMain"><h1>x</h1>
<p style="color: #8b919b">grey on grey</p> <p style="opacity: .4">faded</p>
<p style="background: rgb(0 0 0 / .6)">black on dark</p> <p style="color: #566072">well</p>
<table><tr><th>head</th></tr></table> <img src="data:," width="9" height="9">
<button style="outline: none">dull</button> <button>bright</button> <a href="#" tabindex="-1">lost</a>
<button><svg width="9" height="9"></svg></button> <div style="width: 2000px">wide</div>
</main></body></html>
"""


def test_the_checks_find_what_is_wrong(browse: Browse) -> None:
    """Catches a check that is silent because it looks at nothing."""
    page, _ = browse("about:blank")
    page.set_content(BAD)

    assert [line.split("“")[1] for line in unreadable(page)] == [
        "grey on grey”", "faded”", "black on dark”",
    ]  # fmt: skip
    assert [line.split(":")[0] for line in unnamed(page)] == [
        "no text alternative", "no scope", "no name",
    ]  # fmt: skip
    assert [line.split(": ")[0] for line in unreachable(page)] == [
        "no focus seen", "not by keyboard",
    ]  # fmt: skip
    assert sideways(page)


def test_a_database_that_goes_while_the_page_is_open(
    browse: Browse, filled: Path, tmp_path: Path
) -> None:
    """Catches an error box, or old numbers, on a page that asks again by itself."""
    own = Path(shutil.copy(filled, tmp_path / "quantwatch.db"))
    with serving(f"sqlite:///{own}", WAIT_MS / 1000) as address:
        page, errors = browse(f"{address}/operations")
        settled(page, ".qw-tiles")
        for path in tmp_path.glob("quantwatch.db*"):
            path.unlink()
        page.reload()
        expect(page.locator(".qw-state").first).to_contain_text("can't be read")
        assert page.locator("[data-testid=stException]").count() == 0
        assert errors == []
