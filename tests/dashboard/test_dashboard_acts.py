"""Acts that several pages offer are asked and answered alike, truly, and do what is on the screen."""

from collections.abc import Callable
from typing import Any

import pytest
import streamlit as st
from sqlalchemy import select, update
from streamlit.testing.v1 import AppTest
from tests.dashboard.invented import Spec
from tests.dashboard.invented_actions import ENDPOINT, EVENT, NOW, QUARANTINED, endpoint_state
from tests.dashboard.invented_episodes import write_ended
from tests.dashboard.pages import AsPerson, html, open_page, press_key
from tests.dashboard.test_dashboard_operations import open_part
from tests.dashboard.test_dashboard_overview import queue

from quantwatch.domain import RunResult, RunStatus
from quantwatch.errors import NotFoundError, StoreError, UserError
from quantwatch.store import backlog, baselines, failed_tasks
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import CheckRow, DeliveryRow, EpisodeRow, EventRow, RunRow
from quantwatch_dashboard.components import trouble
from quantwatch_dashboard.roles import AccessError, Role


@pytest.fixture(autouse=True)
def _admin(as_person: AsPerson) -> None:
    as_person(Role.ADMIN)


def change(url: str, *statements: Any) -> None:
    """Change the database without anybody's action."""
    database = open_database(url)
    with database.writer() as session:
        for statement in statements:
            session.execute(statement)
    database.close()
    st.cache_resource.clear()


def asked(page: AppTest, key: str) -> tuple[str, str]:
    """Return the label of a button and the question that it asks, as the page has them."""
    label = page.button(key=f"ask-{key}").label
    press_key(page, f"ask-{key}")
    [question] = [each for each in page.get("html") if 'class="qw-ask"' in each.proto.body]
    return label, question.proto.body


def test_enabling_is_asked_alike_and_promises_nothing(furnished: str) -> None:
    """Catches the promise that what waits is sent: while disabled it becomes dead letters."""
    endpoint_state(furnished, "disabled_auto")
    key = f"enable-{ENDPOINT}"
    on_operations = asked(open_part("Delivery"), key)
    on_alerts = asked(open_page("alerts", show="deliveries", endpoint=ENDPOINT), key)

    assert on_operations == on_alerts
    assert "became dead letters" in on_alerts[1]
    assert "at once" not in on_alerts[1]


def test_releasing_is_asked_alike(furnished: str) -> None:
    """Catches one wording of a risk on one page and another one on the next."""
    key = f"release-{QUARANTINED}"
    pages = open_part("Service"), open_page("check", check=QUARANTINED)
    first, second = (asked(page, key) for page in pages)
    assert first == second


def test_cancelling_is_asked_and_answered_alike(demo_url: str) -> None:
    """Catches a waiting run that only one page can cancel, and an answer that is not true."""
    run_id = queue(demo_url, "demo")
    st.cache_resource.clear()
    key = f"cancel-{run_id}"
    pages = open_part("Service"), open_page("check", check="demo")
    first, second = (asked(page, key) for page in pages)
    assert first == second
    assert "It will not run." in second[1]
    press_key(pages[1], f"do-{key}")
    assert "The run is cancelled." in html(pages[1])


def test_a_run_under_way_is_asked_to_stop(demo_url: str) -> None:
    """Catches "cancelled" said of a run that still measures, and a second request offered."""
    run_id = queue(demo_url, "demo")
    change(demo_url, update(RunRow).where(RunRow.id == run_id).values(status="measuring"))
    page = open_part("Service")
    assert "is lost" in asked(page, f"cancel-{run_id}")[1]
    press_key(page, f"do-cancel-{run_id}")

    assert "The run is asked to stop" in html(page)
    assert not [b for b in page.button if b.label.startswith("Cancel run")]


def test_all_failed_tasks_are_counted(demo_url: str) -> None:
    """Catches a figure that is the length of a list with a limit."""
    database = open_database(demo_url)
    with database.writer() as session:
        for number in range(53):
            failed_tasks.note_failure(session, "delivery", "http_503", f"e{number}", "503")
        failed_tasks.resolve(session, "delivery", "e0")
        assert failed_tasks.num_open(session) == 52
    database.close()
    shown = html(open_part("Service"))

    assert "52 open" in shown
    assert "The newest 50 of 52." in shown


def _more_dead(url: str, count: int) -> None:
    database = open_database(url)
    with database.writer() as session:
        for number in range(count):
            event_id = f"01JF{number:022d}"
            session.add(EventRow(id=event_id, type="test", occurred_at=NOW, seq=number + 2,
                                 subject="endpoint:ops", body=b"{}"))  # fmt: skip
            session.flush()
            session.add(
                DeliveryRow(event_id=event_id, endpoint=ENDPOINT, subject="endpoint:ops",
                            seq=number + 2, state="dead", attempt=9, created_at=NOW, next_at=NOW,
                            ended_at=NOW, left_machine=True)
            )  # fmt: skip
    database.close()
    st.cache_resource.clear()


def test_dead_letters_beyond_the_list_are_told(furnished: str) -> None:
    """Catches fifty that look like all of them."""
    _more_dead(furnished, 54)
    page = open_page("alerts", show="deliveries", endpoint=ENDPOINT)
    assert "The newest 50 of 55" in html(page)


def test_a_pin_is_what_was_chosen_last(furnished: str, db: Database) -> None:
    """Catches a press before the page is drawn again that pins the run chosen before."""
    page = open_page("check", check="demo")
    box = page.selectbox(key="filter-pin")
    offered = " ".join(box.options)
    other = next(run for run in runs(db) if run != box.value and run[-8:] in offered)
    box.set_value(other)
    press_key(page, "do-pin-demo")

    assert baselines.get_pinned(db, "demo") == other
    assert f"Later runs are compared with …{other[-8:]}" in html(page)


def runs(db: Database) -> list[str]:
    with db.reader() as session:
        return list(session.scalars(select(RunRow.id).where(RunRow.status == "succeeded")))


def test_a_replay_is_of_what_was_chosen_last(furnished: str, db: Database) -> None:
    """Catches another dead letter that is told again than the one on the screen."""
    _more_dead(furnished, 1)
    page = open_page("alerts", show="deliveries", endpoint=ENDPOINT)
    box = page.selectbox(key="filter-event")
    before = str(box.value)
    after = EVENT if before != EVENT else f"01JF{0:022d}"
    box.set_value(after)
    press_key(page, "do-replay-one")

    with db.reader() as session:
        states = dict(session.execute(select(DeliveryRow.event_id, DeliveryRow.state)).all())
    assert (states[before], states[after]) == ("dead", "pending")


def test_all_are_told_again_only_as_it_was_asked(furnished: str, db: Database) -> None:
    """Catches thirty days told again after a question about one."""
    page = press_key(open_page("alerts", show="deliveries", endpoint=ENDPOINT), "ask-replay-all")
    page.selectbox(key="filter-since").set_value("30d")
    press_key(page, "do-replay-all")

    assert "Another choice was made after the question" in html(page)
    with db.reader() as session:
        assert set(session.scalars(select(DeliveryRow.state))) == {"dead"}


@pytest.mark.parametrize(("kind", "offered"), [("pinned", True), ("rolling", False)])
def test_pins_are_offered_where_they_count(furnished: str, kind: str, offered: bool) -> None:
    """Catches "later runs are compared with …" of a check whose baseline is no pin."""
    database = open_database(furnished)
    with database.writer() as session:
        document = session.scalars(select(CheckRow.config).where(CheckRow.name == "demo")).one()
    database.close()
    config = {**(document or {}), "baseline": {"kind": kind}}
    change(furnished, update(CheckRow).where(CheckRow.name == "demo").values(config=config))
    page = open_page("check", check="demo")
    assert bool([b for b in page.button if b.label == "Pin this run"]) is offered


TITLES: dict[str, tuple[Exception, str, str]] = {
    "not there": (NotFoundError("no run x"), "That is not in this database", "no run x"),
    "no role": (AccessError("Pinning needs a role"), "That needs another role", "needs a role"),
    "cannot be": (UserError("measured nothing"), "That can&#x27;t be shown", "measured nothing"),
    "unreadable": (StoreError("locked"), "The database can&#x27;t be read", "--database"),
}


@pytest.mark.parametrize(("error", "title", "said"), TITLES.values(), ids=TITLES)
def test_errors_have_their_own_titles(
    error: Exception, title: str, said: str, empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches "not in this database" of what is there, and commands for another database."""
    cards: list[str] = []
    monkeypatch.setattr(st, "html", lambda body: cards.append(str(body)))

    @trouble.guarded
    def view() -> None:
        raise error

    view()
    assert title in cards[0]
    assert said in cards[0]
    others = {each[1] for each in TITLES.values()} - {title}
    assert not [other for other in others if other in cards[0]]


def test_nothing_to_compare_is_not_missing(
    save_run: Callable[[Spec], RunResult], end_run: Callable[..., None]
) -> None:
    """Catches a run that is there and is said not to be."""
    save_run(Spec(run_id="01JA", num_layers=1, num_prompts=1))
    end_run(Spec(run_id="01JB"), RunStatus.FAILED, "disk full")
    shown = html(open_page("compare", run_a="01JB", run_b="01JA"))
    assert "measured no candidate" in shown
    assert "That is not in this database" not in shown


def test_an_endpoint_is_called_the_same_everywhere(furnished: str) -> None:
    """Catches red on one page and amber on the next for one state, and names of the code."""
    endpoint_state(furnished, "disabled_auto")
    pages = html(open_part("Delivery")), html(open_page("alerts", show="deliveries"))

    for shown in pages:
        assert 'qw-tone-regression"><i aria-hidden="true">✕</i>Disabled</span>' in shown
        assert "after days without any success" in shown
        assert "Dead letter" in shown
        assert "retry_wait" not in shown


def test_what_endpoints_have_got_is_read(furnished: str, db: Database) -> None:
    """Catches a message that arrived and isn't found, and one of another subject that is."""
    with db.reader() as session:
        number = session.scalars(select(EpisodeRow.alert_id)).one()
    write_ended(furnished, number)
    change(
        furnished,
        update(DeliveryRow).where(DeliveryRow.endpoint == "ops", DeliveryRow.state == "pending")
        .values(state="delivered", ended_at=NOW),
    )  # fmt: skip
    subjects = {f"other{i}" for i in range(1200)} | {"demo/int8-fault"}
    with db.reader() as session:
        found = backlog.addressed(session, subjects, {"ops", "pager"})
    assert {(one.endpoint, one.subject, one.state) for one in found} == {
        ("ops", "demo/int8-fault", "delivered"), ("pager", "demo/int8-fault", "dead"),
    }  # fmt: skip
