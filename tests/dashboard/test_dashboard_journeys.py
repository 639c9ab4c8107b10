"""What people do on the dashboard, in a real browser, from what they see first to what they need."""

import json
import re

import pytest
from playwright.sync_api import Page, expect
from tests.dashboard.browsing import MARKS, PHONE, Browse, settled
from tests.dashboard.conftest import Site
from tests.dashboard.invented_actions import RUN
from tests.dashboard.invented_service import GOING, go_on

from quantwatch.domain import RunStatus
from quantwatch.store import audit, runs
from quantwatch.store.session import open_database

pytestmark = MARKS
POINTS = ".js-plotly-plot .scatterlayer .points path"
HEATMAP = ".js-plotly-plot .heatmaplayer image"
CELLS = ".js-plotly-plot:has(.heatmaplayer) .scatterlayer .point"


def newest(site: Site) -> tuple[str, str]:
    """Return what was done last, and to what."""
    database = open_database(site.database, read_only=True)
    try:
        entry = audit.list_entries(database, 1)[0]
        return entry.action, entry.subject
    finally:
        database.close()


def click_point(page: Page, index: int, points: str = POINTS) -> None:
    """Click on a point, of the first chart."""
    point = page.locator(points).nth(index)
    point.scroll_into_view_if_needed()
    page.wait_for_timeout(300)
    box = point.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def test_from_the_overview_to_a_token(site: Site, browse: Browse) -> None:
    """Catches a filter that does nothing, a click that is lost, a run without its pictures, and
    text of a prompt that the browser executes or renders."""
    page, errors = browse(site.address)
    settled(page, ".qw-overview")
    assert page.inner_text("h1") == "1 regression"
    page.get_by_text("Regression 1").click()
    page.wait_for_url("**verdict=regression**")
    page.wait_for_function("document.querySelectorAll('.qw-overview tbody tr').length === 1")
    page.locator(".qw-overview td.qw-name a").first.click()

    settled(page, POINTS)
    assert page.inner_text("h1") == "demo"
    assert "int8-fault: layers.14.mlp.down_proj" in page.inner_text(".qw-what")
    click_point(page, 6)

    page.wait_for_url(f"**/run?run={RUN}*")
    settled(page, HEATMAP)
    assert page.inner_text(".qw-what") == "layers.14.mlp.down_proj"
    assert "int8-fault" in page.inner_text(".qw-hero")
    # That of one token over the layers is drawn when it is opened.
    assert page.locator(".js-plotly-plot").count() == 5
    assert "candidate=int8-fault" in page.url
    click_point(page, 5, CELLS)
    page.wait_for_url(re.compile("layer=(layers|embedding)"))

    page.locator('.qw-scroll.qw-top a[href*="prompt="]').first.click()
    settled(page, ".qw-prompt .qw-at")
    settled(page, HEATMAP)
    assert "prompt=" in page.url
    assert "<script>alert(1)</script>" in page.inner_text(".qw-prompt")
    assert page.locator(".qw-prompt script").count() == 0
    ticks = page.locator(".xaxislayer-above text").all_text_contents()
    assert "<script>" in json.dumps(ticks, ensure_ascii=False)
    assert errors == []


def test_an_alert_on_a_phone(site: Site, browse: Browse) -> None:
    """Catches a form that is not filled, a press that is lost, a story that does not draw."""
    page, errors = browse(f"{site.address}/alerts?state=open")
    page.set_viewport_size(PHONE)
    settled(page, ".qw-cards")
    page.get_by_role("link", name="output-kl").click()
    settled(page, ".qw-story")
    assert page.locator(".qw-story li").count() == 1

    page.get_by_role("button", name="Acknowledge …").click()
    page.get_by_label("What is being done").fill("rolled back")
    # At once, without leaving the field first: the comment and the press come together.
    page.get_by_role("button", name="Acknowledge", exact=True).click()
    expect(page.locator(".qw-said")).to_have_text("Acknowledged.")
    expect(page.locator(".qw-story")).to_contain_text("rolled back")
    assert newest(site) == ("acknowledge", f"alert {site.alert}")

    page.get_by_text("Silence …").click()
    page.get_by_label("Why, for the others").fill("new calibration data")
    page.get_by_role("button", name="Silence", exact=True).click()
    expect(page.locator(".qw-knows")).to_contain_text("silenced by")
    expect(page.locator(".qw-story")).to_contain_text("new calibration data")
    page.get_by_role("button", name="End it now").click()
    expect(page.locator(".qw-said", has_text="The silence has ended")).to_be_visible()
    assert errors == []


def test_a_run_is_started_seen_in_the_queue_and_cancelled(site: Site, browse: Browse) -> None:
    """Catches a button without an answer, a run that shows only after a reload, and one that a
    single press ends."""
    page, errors = browse(f"{site.address}/check?check=demo")
    settled(page, POINTS)
    page.get_by_role("button", name="Run now").click()
    expect(page.locator(".qw-said")).to_contain_text("waits for a worker")
    action, subject = newest(site)
    run_id = subject.removeprefix("run ")
    assert action == "requested"
    expect(page.locator(f'.qw-run a[href*="{run_id}"]')).to_be_visible()

    page.get_by_role("link", name="Operations").click()
    mine = page.locator(".qw-queued", has=page.locator(f'a[href*="{run_id}"]'))
    expect(mine).to_be_visible()
    page.locator(f".st-key-ask-cancel-{run_id} button").click()
    expect(page.locator(".qw-ask")).to_contain_text("will not run")
    assert newest(site) == (action, subject)
    page.locator(f".st-key-do-cancel-{run_id} button").click()
    expect(page.locator(".qw-said")).to_contain_text("The run is cancelled.")
    assert newest(site) == ("cancelled", subject)
    assert errors == []


@pytest.mark.parametrize("address", ["", f"run?run={GOING}"])
def test_progress_is_seen_without_reloading(address: str, site: Site, browse: Browse) -> None:
    """Catches a bar that stands still, and a run that is over and still goes on here."""
    database = open_database(site.database)
    go_on(database, "bf16", 300)
    page, errors = browse(f"{site.address}/{address}")
    bar = page.locator("[role=progressbar]").first
    expect(bar).to_have_attribute("aria-valuenow", "25")
    go_on(database, "int8", 900)
    expect(bar).to_have_attribute("aria-valuenow", "75")
    expect(page.locator("body")).to_contain_text("easuring: int8")
    database.close()
    assert errors == []


def test_from_a_run_to_a_pair(site: Site, browse: Browse) -> None:
    """Catches a link that loses the run, and a swap that the address does not know."""
    page, errors = browse(f"{site.address}/run?run={RUN}")
    page.get_by_role("link", name="compare with …").click()
    settled(page, HEATMAP)
    assert f"run_b={RUN}" in page.url
    assert "too few prompts to tell: 4" in page.inner_text(".qw-versus")
    page.get_by_role("button", name="Swap").click()
    page.wait_for_url(f"**run_a={RUN}**")
    assert page.locator("[data-testid=stException]").count() == 0
    assert errors == []


def test_a_run_that_ends_is_over_on_the_open_page(site: Site, browse: Browse) -> None:
    """Catches a page that goes on waiting for a run that has failed."""
    page, errors = browse(f"{site.address}/run?run={GOING}")
    settled(page, ".qw-progress")
    database = open_database(site.database)
    runs.end_run(database, GOING, RunStatus.FAILED, "disk full: 12 MB free")
    database.close()
    expect(page.locator("body")).to_contain_text("Run failed")
    expect(page.locator("body")).to_contain_text("disk full: 12 MB free")
    assert errors == []
