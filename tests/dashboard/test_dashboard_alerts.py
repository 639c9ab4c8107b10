"""The alerts page: what is open, one episode, silences and deliveries, and what can be done."""

from typing import Any

import pytest
from sqlalchemy import select, update
from tests.dashboard.invented_actions import CONFIG, EPISODE, apply_to_demo, endpoint_state
from tests.dashboard.invented_episodes import write_ended
from tests.dashboard.pages import AsPerson, html, open_page, press_key

from quantwatch.store import audit, silences
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import AlertRow, DeliveryRow, EpisodeRow
from quantwatch_dashboard.roles import Role
from quantwatch_dashboard.views import alerts_silences


@pytest.fixture(autouse=True)
def _admin(as_person: AsPerson) -> None:
    as_person(Role.ADMIN, "ann@example.com")


@pytest.fixture
def alert(db: Database) -> int:
    """The number of the alert that fires."""
    with db.reader() as session:
        return int(session.scalars(select(EpisodeRow.alert_id)).one())


def newest(db: Database) -> tuple[str, str]:
    """Return who did what last."""
    entry = audit.list_entries(db, 1)[0]
    return entry.actor, entry.action


@pytest.mark.usefixtures("furnished")
def test_who_knows_is_on_the_first_page() -> None:
    """Catches a list that says what is wrong but not whether anybody has been told."""
    shown = html(open_page("alerts"))

    assert "1 alert open, 1 unacknowledged" in shown
    assert "output KL 0.31 &gt; 0.15" in shown
    assert "unacknowledged" in shown
    assert "no endpoint was notified" in shown


@pytest.mark.parametrize(
    "alerting",
    [{"maintenance": [{"cron": "0 2 * * *", "lasts": "2h"}]}, {"flapping": {"often": 3}}],
    ids=["maintenance", "flapping"],
)
def test_settings_of_another_version_leave_the_alerts_readable(
    furnished: str, alert: int, alerting: dict[str, Any]
) -> None:
    """Catches an update after which nobody can see alerts until the service has started."""
    apply_to_demo(furnished, {**CONFIG, "alerting": alerting})
    shown = html(open_page("alerts"))

    assert "1 alert open, 1 unacknowledged" in shown
    assert "Settings of demo were applied by another version" in shown


@pytest.mark.parametrize(
    ("query", "num"),
    [({}, 2), ({"state": "open"}, 1), ({"state": "ended"}, 1), ({"check": "chat-int8"}, 0),
     ({"severity": "warning"}, 0), ({"q": "dana"}, 1), ({"q": "nowhere"}, 0),
     ({"state": "?", "check": "?"}, 2)],
    ids=["all", "open", "ended", "check", "severity", "text", "no such text", "bad address"],
)  # fmt: skip
def test_filters_are_restored_from_the_address(
    furnished: str, alert: int, query: dict[str, str], num: int
) -> None:
    """Catches a link to a filtered list that shows another one."""
    write_ended(furnished, alert)

    assert html(open_page("alerts", **query)).count("Open →") == num


def test_an_alert_is_acknowledged(db: Database, alert: int) -> None:
    """Catches a button that does nothing, or a page that does not show what it did."""
    page = open_page("alerts", alert=str(alert))
    press_key(page, f"ask-ack-{EPISODE}")
    page.text_input(key=f"words-ack-{EPISODE}").input("rolled back")
    press_key(page, f"do-ack-{EPISODE}")

    assert newest(db) == ("ann@example.com", "acknowledge")
    assert "acknowledged by <b>ann@example.com</b>" in html(page)
    assert "Acknowledged by ann@example.com" in html(page)


def test_a_silence_says_first_what_it_matches(db: Database, alert: int) -> None:
    """Catches a silence that is made blindly, matches something else, or can't be ended."""
    page = open_page("alerts", alert=str(alert))
    key = f"alert-{alert}"
    assert "Would match 1 of 1 open alert:" in html(page)
    page.text_input(key=f"silence-rule-{key}").input("layer-*").run()
    assert "Matches nothing that is open now" in html(page)
    page.text_input(key=f"silence-rule-{key}").input("output-*").run()
    page.text_input(key=f"silence-why-{key}").input("new calibration data")
    press_key(page, f"do-silence-{key}")

    with db.reader() as session:
        (made,) = silences.active_silences(session)
    assert made.matcher == {"check": "demo", "candidate": "int8-fault", "rule": "output-*"}
    assert (made.ends_at - made.starts_at).total_seconds() == 8 * 3600
    assert "silenced by ann@example.com" in html(page)
    press_key(page, f"do-unsilence-{made.id}")
    assert "The silence has ended" in html(page)
    assert newest(db) == ("ann@example.com", "unsilence")


@pytest.mark.parametrize(
    ("length", "words"),
    [("soon", "is no length of time"), ("0s", "longer than nothing"), ("8h", "needs a comment")],
    ids=["no length", "nothing", "no comment"],
)
def test_a_silence_that_is_refused(
    db: Database, monkeypatch: pytest.MonkeyPatch, length: str, words: str
) -> None:
    """Catches a traceback, or a silence without an end, for what somebody typed."""
    # The test runner knows no option that a person adds.
    monkeypatch.setattr(alerts_silences, "_LENGTHS", ("8h", "8h", "soon", "0s"))
    page = open_page("alerts", show="silences")
    page.text_input(key="silence-check-new").input("demo")
    page.selectbox(key="silence-for-new").set_value(length)
    page.text_input(key="silence-why-new").input("" if length == "8h" else "why")
    press_key(page, "do-silence-new")

    assert words in html(page)
    with db.reader() as session:
        assert not silences.active_silences(session)


@pytest.mark.usefixtures("furnished")
@pytest.mark.parametrize(
    "query",
    [{"alert": "999"}, {"alert": "x"}, {"alert": "9" * 30}, {"episode": "01JNOTHERE"}],
    ids=["unknown number", "no number", "huge number", "unknown episode"],
)
def test_an_address_without_an_episode(query: dict[str, str]) -> None:
    """Catches a traceback for a link to what was deleted."""
    assert "That is not in this database" in html(open_page("alerts", **query))


def test_a_past_episode_tells_its_story(furnished: str, alert: int) -> None:
    """Catches an episode whose messages, or their fate, can't be seen any more."""
    write_ended(furnished, alert, comment="<script>alert(1)</script>")
    shown = html(open_page("alerts", episode="01JOLD"))

    assert "pager: dead letter" in shown
    assert "410 Gone &lt;b&gt;" in shown
    assert "ops: pending" in shown
    assert "Recovering" in shown
    assert "better than the leave limit for long enough" in shown
    assert "a newer one of the same alert is open" in shown
    assert "<script" not in shown


def test_a_dead_letter_is_told_again(furnished: str, db: Database) -> None:
    """Catches a lost message that nobody can send from here, and a disabled endpoint unseen."""
    endpoint_state(furnished, "disabled_gone")
    page = open_page("alerts", show="deliveries", endpoint="ops")
    assert "the receiver is gone (410)" in html(page)
    press_key(page, "do-replay-one")
    assert "Endpoint ops is disabled_gone" in html(page)
    press_key(page, "ask-enable-ops")
    press_key(page, "do-enable-ops")
    assert "Enabled. Its dead letters" in html(page)
    press_key(page, "ask-replay-all")
    press_key(page, "do-replay-one")

    assert newest(db) == ("ann@example.com", "delivery.replay")
    with db.reader() as session:
        assert session.scalar(select(DeliveryRow.state)) == "pending"


def test_the_dead_letters_of_one_endpoint_alone(furnished: str, db: Database, alert: int) -> None:
    """Catches a replay for one receiver that wakes the other one, too."""
    write_ended(furnished, alert)
    page = open_page("alerts", show="deliveries", endpoint="pager", since="30d")
    press_key(page, "ask-replay-all")
    press_key(page, "do-replay-all")

    assert "1 delivery is pending again." in html(page)
    assert (audit.list_entries(db, 1)[0].after or {})["endpoint"] == "pager"
    with db.reader() as session:
        rows = session.execute(select(DeliveryRow.endpoint, DeliveryRow.state))
        states = {(row.endpoint, row.state) for row in rows}
    assert {("pager", "pending"), ("ops", "dead")} <= states


def test_without_the_role_nothing_can_be_pressed(
    furnished: str, alert: int, as_person: AsPerson
) -> None:
    """Catches a viewer who silences, and a page that hides what they could not do."""
    as_person(Role.VIEWER)

    for query in ({"alert": str(alert)}, {"show": "silences"}, {"show": "deliveries"}):
        page = open_page("alerts", **query)
        assert page.button, furnished
        assert all(button.disabled for button in page.button)


def test_a_pending_alert_and_an_unknown_severity_of_value(furnished: str, alert: int) -> None:
    """Catches a page that needs a value, or offers to acknowledge what has not fired."""
    database = open_database(furnished)
    with database.writer() as session:
        mine = update(AlertRow).where(AlertRow.id == alert)
        session.execute(mine.values(state="pending", awaits_run_id="01JD"))
        values = {"fired_at": None, "evidence": {"value": None, "value_kind": "nan"}}
        session.execute(update(EpisodeRow).values(**values))
    database.close()
    listed, one = html(open_page("alerts")), html(open_page("alerts", alert=str(alert)))

    assert "nobody is notified before a second run confirms it" in listed
    assert "NaN" in listed
    assert "It has not fired yet" in one
