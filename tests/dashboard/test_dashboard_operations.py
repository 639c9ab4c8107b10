"""The page Operations: what it says of the service, its actions, and what it never shows."""

from datetime import UTC, datetime, timedelta

import pytest
import streamlit as st
from sqlalchemy import select
from streamlit.testing.v1 import AppTest
from tests.dashboard.invented_actions import ENDPOINT, QUARANTINED, endpoint_state
from tests.dashboard.invented_service import CARD, serve
from tests.dashboard.pages import AsPerson, html, open_page, press_key

from quantwatch.domain import RunStatus
from quantwatch.store.attempts import Telemetry
from quantwatch.store.components import Component, Seen
from quantwatch.store.disk import Space
from quantwatch.store.leader import Leader
from quantwatch.store.session import Database
from quantwatch.store.states import UnendedRun
from quantwatch.store.tables import CheckRow, EndpointRow, RunRow
from quantwatch_dashboard import text
from quantwatch_dashboard.logic import gpu_runs, service_words
from quantwatch_dashboard.roles import Role

PARTS = ("Service", "Delivery", "Database", "GPUs", "Settings", "Audit")
NOW = datetime(2026, 11, 30, 1, tzinfo=UTC)


def open_part(part: str, **query: str) -> AppTest:
    """Open a part of the page."""
    return open_page("operations", show=part.casefold(), **query)


@pytest.fixture
def running(furnished: str) -> str:
    """A service that runs: parts, a run that waits, a broken endpoint, telemetry, a schedule."""
    serve(furnished)
    return furnished


EMPTY = {
    "Service": ("No service has been seen", "quantwatch.toml gives it one"),
    "Delivery": ("No endpoint was ever configured",),
    "Database": ("How fast it grows is known once a day",),
    "GPUs": ("No GPU was seen during a run", "No run was kept"),
    "Settings": ("Nothing was applied yet", "config plan"),
    "Audit": ("Nothing was changed yet",),
}


@pytest.mark.parametrize("part", EMPTY)
def test_empty_parts_say_what_fills_them(empty_url: str, part: str) -> None:
    """Catches an empty box."""
    shown = html(open_part(part))
    assert all(words in shown for words in EMPTY[part])


@pytest.mark.parametrize("part", PARTS)
def test_nothing_stored_becomes_markup(running: str, part: str) -> None:
    """Catches a script from a message, a card's name, an actor or a broken configuration."""
    shown = html(open_part(part, check="demo", section="endpoint ops"))
    assert "<script>" not in shown
    assert "hunter2" not in shown
    assert "s3cret" not in shown


def test_the_service_at_a_glance(running: str) -> None:
    """Catches figures that say all is well while a check is in quarantine."""
    shown = html(open_part("Service"))

    assert "The service runs; needs attention: deliveries, failed tasks" in shown
    assert "h/scheduler; its lease lasts" in shown
    assert "1 dead letter" in shown
    assert "1 check in quarantine; the configuration is broken" in shown
    assert "waits for a worker on cpu" in shown
    assert "a run of it waits or is under way" in shown


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("Delivery", ("Enabled", "Dead letter")),
        ("Database", ("measurement", "layer statistics", "these are the defaults")),
        ("GPUs", ("thermal, by hardware", "63 %", "power_watts: Not Supported", "12 GB of 24 GB")),
        ("Settings", ("/etc/q.toml", "streamlit")),
    ],
    ids=["delivery", "database", "gpus", "settings"],
)
def test_parts_of_a_filled_database(running: str, part: str, said: tuple[str, ...]) -> None:
    """Catches a part that leaves out what it is for."""
    shown = html(open_part(part))
    assert [words for words in said if words not in shown] == []


def test_settings_of_a_check(running: str) -> None:
    """Catches a check of the address that isn't shown, and one that is not there any more."""
    shown = html(open_part("Settings", check="demo"))
    assert "/etc/quantwatch" in shown
    assert "&quot;org/m8&quot;" in shown
    assert "1 check is applied" in html(open_part("Settings", check="no-such-check"))


@pytest.fixture
def person(as_person: AsPerson) -> None:
    """Somebody who may do everything."""
    as_person(Role.ADMIN)


def test_cancelling_is_asked_first_and_written_down(
    running: str, person: None, db: Database
) -> None:
    """Catches a run that one click ends, and a click of which nobody knows."""
    with db.reader() as session:
        run_id = session.scalars(select(RunRow.id).where(RunRow.status == "queued")).one()
    page = press_key(open_part("Service"), f"ask-cancel-{run_id}")
    with db.reader() as session:
        assert session.get_one(RunRow, run_id).status == "queued"
    press_key(page, f"do-cancel-{run_id}")
    assert "The run is cancelled." in html(page)

    with db.reader() as session:
        assert session.get_one(RunRow, run_id).status == "cancelled"
    st.cache_resource.clear()
    shown = html(open_part("Audit", who="ann"))
    assert ">ann<" in shown
    assert f"run {run_id}" in shown


def test_releasing_and_enabling(running: str, person: None, db: Database) -> None:
    """Catches a button that is there and does nothing."""
    endpoint_state(running, "disabled_auto")
    released = press_key(
        open_part("Service"), f"ask-release-{QUARANTINED}", f"do-release-{QUARANTINED}"
    )
    enabled = press_key(open_part("Delivery"), f"ask-enable-{ENDPOINT}", f"do-enable-{ENDPOINT}")
    assert "It may run again." in html(released)
    assert "Enabled. Its dead letters" in html(enabled)

    with db.reader() as session:
        apart = select(CheckRow.quarantined_at).where(CheckRow.name == QUARANTINED)
        assert session.scalars(apart).one() is None
        assert session.get_one(EndpointRow, ENDPOINT).state == "enabled"


def test_an_operator_sees_why_not(running: str) -> None:
    """Catches an action that vanishes without the role for it."""
    page = open_part("Service")
    [button] = [one for one in page.button if one.label == "End quarantine"]
    assert button.disabled
    assert "Needs the role admin" in button.help


def test_an_odd_part_is_the_first(empty_url: str) -> None:
    """Catches an address from somewhere else."""
    assert "Parts of the service" in html(open_part("Nonsense"))


def seen(kind: str, age_s: float, **details: object) -> Seen:
    return Seen(Component(f"h/{kind}", kind, "h", 1), timedelta(seconds=age_s), details)


STOPPED = Leader("h/scheduler", 3, timedelta(minutes=-11))
HEADLINES: dict[str, tuple[list[Seen], float | None, str]] = {
    "nothing": ([], None, "No service has been seen"),
    "only workers": ([seen("worker", 1)], None, "The scheduler is silent"),
    "silent": ([seen("scheduler", 500)], 500.0, "The scheduler is silent"),
    "well": ([seen("scheduler", 1), seen("worker", 1)], 1.0, "The service runs"),
}


@pytest.mark.parametrize(("parts", "silence", "said"), HEADLINES.values(), ids=HEADLINES)
def test_headlines(parts: list[Seen], silence: float | None, said: str) -> None:
    """Catches a service that is said to run when nobody schedules."""
    assert service_words.headline(parts, None, silence, []) == said


def test_a_clean_stop_is_no_service_that_never_was() -> None:
    """Catches "never looked" minutes after a service was stopped by hand."""
    assert service_words.headline([], STOPPED, None, []) == "The service stopped 11 min ago"
    figure = service_words.scheduler(STOPPED, None)
    assert (figure.value, figure.bad) == ("stopped 11 min ago", True)
    # One that was killed stays on the list, and its lease runs out beside it.
    silent = service_words.headline([seen("scheduler", 500)], STOPPED, 500.0, [])
    assert silent == "The scheduler is silent"


def test_who_was_replaced_is_no_trouble() -> None:
    """Catches an alarm for a day after each restart, and none when a part is gone for good."""
    replaced = [seen("worker", 1, run="x"), seen("worker", 5000), seen("delivery", 5000)]
    figure = service_words.workers(replaced)
    assert (figure.value, figure.detail, figure.bad) == ("1", "1 measuring, delivery silent", True)
    assert not service_words.workers(replaced[:2]).bad
    assert service_words.workers([]).bad


def test_figures() -> None:
    """Catches a lease that has run out, an old delivery and a full disk that look well."""
    held = Leader("h", 3, timedelta(seconds=9))
    assert not service_words.scheduler(held, 4.0).bad
    assert service_words.scheduler(Leader("h", 3, timedelta(seconds=-1)), 4.0).bad
    assert service_words.scheduler(held, None).bad
    late = service_words.deliveries({"pending": 2}, NOW - timedelta(hours=1), NOW)
    assert (late.value, late.detail, late.bad) == ("2 open", "oldest 1 h ago; 0 dead letters", True)
    assert not service_words.deliveries({"delivered": 9}, None, NOW).bad
    assert service_words.room(10, Space(5, 100)).detail.endswith("matrices per token are not kept")
    assert service_words.room(10, Space(1, 100)).bad
    assert not service_words.room(10, Space(50, 100)).bad
    assert "does not tell" in service_words.room(10, None).detail


def test_queue_in_words() -> None:
    """Catches a run under way that is counted as waiting."""

    def run(status: RunStatus) -> UnendedRun:
        old = NOW - timedelta(minutes=5)
        return UnendedRun("1", "c", status, None, 0, 0, "manual", None, None, 0, old, old,
                          None, None, None)  # fmt: skip

    figure = service_words.queue([run(RunStatus.QUEUED), run(RunStatus.MEASURING)], NOW)
    assert (figure.value, figure.detail) == ("1 wait", "oldest 5 min ago; 1 under way")


@pytest.mark.parametrize(
    ("value", "said"),
    [(-2, "0 s"), (4, "4 s"), (200, "3 min"), (7200, "2 h"), (400_000, "5 d")],
)
def test_ages(value: float, said: str) -> None:
    """Catches seconds where nobody counts them."""
    assert text.passed(value) == said


def attempt(gpus: object, *, ended: bool = True) -> Telemetry:
    end = NOW if ended else None
    return Telemetry("1", "c", NOW, end, None, gpus)  # type: ignore[arg-type]


WHY = {
    "not over": (attempt(None, ended=False), "not over yet"),
    "nothing kept": (attempt(None), "not recorded"),
    "no driver": (attempt({"not_available": "Driver Not Loaded"}), "Driver Not Loaded"),
    "nothing told": (attempt({}), "nothing was told"),
}


@pytest.mark.parametrize(("kept", "why"), WHY.values(), ids=WHY)
def test_runs_without_a_gpu_say_why(kept: Telemetry, why: str) -> None:
    """Catches a 0 where nothing was measured."""
    [use] = gpu_runs.run_uses([kept])
    assert (use.cards, use.why) == ((), why)


def test_cards_over_runs() -> None:
    """Catches the newest run first in a trend, and a peak that is the mean."""
    calm = CARD | {"memory_used_bytes": {"max": 6e9}, "throttle_reasons": []}
    uses = gpu_runs.run_uses([attempt({"gpus": {"G": CARD}}), attempt({"gpus": {"G": calm}})])
    [card] = gpu_runs.cards(uses)

    assert card.memory_shares == (0.25, 0.5)
    assert (card.memory_peak, card.num_throttled, card.hottest) == (1.2e10, 1, None)
