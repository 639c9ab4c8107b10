"""Overview and check in a real browser: filter, trend, a click that opens a run, a run started."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.dashboard.invented_actions import furnish
from tests.dashboard.test_dashboard_browser import (
    WAIT_MS,
    OpenPage,
    browser,
    open_page,
    pytestmark,
    settled,
)

from quantwatch_dashboard.launch import serving

__all__ = ["browser", "open_page", "pytestmark"]
POINTS = ".js-plotly-plot .scatterlayer .points path"


@pytest.fixture(scope="module")
def address(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The dashboard on a database of its own: these tests write into it."""
    own = tmp_path_factory.mktemp("acting") / "quantwatch.db"
    shutil.copy(filled, own)
    furnish(f"sqlite:///{own}")
    with serving(f"sqlite:///{own}", WAIT_MS / 1000) as found:
        yield found


def test_from_the_overview_to_a_run_by_a_click_on_the_trend(
    address: str, open_page: OpenPage
) -> None:
    """Catches a filter that does nothing, a trend that is not drawn, and a click that is lost."""
    page, errors = open_page(address)
    settled(page, ".qw-overview")
    page.get_by_text("Regression 1").click()
    page.wait_for_url("**verdict=regression**")
    page.wait_for_function("document.querySelectorAll('.qw-overview tbody tr').length === 1")
    page.locator(".qw-overview td.qw-name a").first.click()
    settled(page, POINTS)
    assert page.inner_text("h1") == "demo"
    assert "int8-fault: layers.14.mlp.down_proj" in page.inner_text(".qw-what")
    assert page.locator("[data-testid=stException]").count() == 0

    point = page.locator(POINTS).nth(2)
    point.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    box = point.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_url("**/run?run=01JD*")
    settled(page, ".qw-hero")
    assert errors == []


def test_starting_a_run_shows_it(address: str, open_page: OpenPage) -> None:
    """Catches a button without an answer, and a run that shows only after a reload."""
    page, errors = open_page(f"{address}/check?check=demo", "dark")
    settled(page, POINTS)
    assert page.locator(".qw-run").count() == 0
    page.get_by_role("button", name="Run now").click()
    page.wait_for_selector(".qw-run")
    assert "waits for a worker" in page.inner_text(".qw-run")
    page.wait_for_selector(".qw-said")
    assert "waits for a worker" in page.inner_text(".qw-said")
    assert errors == []


def test_phone_width_has_no_sideways_scrolling(address: str, open_page: OpenPage) -> None:
    """Catches a table or picture that pushes the page out of a phone's screen."""
    page, errors = open_page(f"{address}/check?check=demo")
    page.set_viewport_size({"width": 390, "height": 900})
    for path, awaited in (("check?check=demo", POINTS), ("", ".qw-overview")):
        page.goto(f"{address}/{path}")
        settled(page, awaited)
        wide = page.eval_on_selector(
            "[data-testid=stMain]", "e => [e.scrollWidth, e.clientWidth, window.innerWidth]"
        )
        assert wide[0] <= wide[1] <= wide[2] == 390, path
    assert errors == []
