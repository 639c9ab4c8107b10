"""What the dashboard writes: once, by whom, and only with the role for it."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.invented_actions import (
    CONFIG,
    ENDPOINT,
    EPISODE,
    EVENT,
    QUARANTINED,
    RUN,
    apply_to_demo,
    endpoint_state,
)

from quantwatch.domain import RunStatus
from quantwatch.errors import ConfigError, UserError
from quantwatch.store import audit, episodes, silences
from quantwatch.store.session import Database
from quantwatch.store.summaries import get_summary
from quantwatch_dashboard import actions
from quantwatch_dashboard.roles import How, Person, Role

ANN = Person("ann@example.com", Role.ADMIN, How.SIGNED_IN)
HOUR = timedelta(hours=1)
KEY = "a key of eight letters or more"
Act = Callable[[Person], Any]


def entries(db: Database) -> list[tuple[str, str, str]]:
    return [(one.actor, one.action, one.subject) for one in audit.list_entries(db)]


@pytest.mark.slow
def test_a_double_click_starts_one_run(db: Database) -> None:
    """Catches two runs of one click, one not of the check as applied, and one nobody asked for."""
    first = actions.run_now(ANN, "demo", KEY)
    again = actions.run_now(ANN, "demo", KEY)
    other = actions.run_now(ANN, "demo", KEY + "2")

    assert (first.is_new, again.is_new, other.is_new) == (True, False, True)
    assert first.run_id == again.run_id != other.run_id
    run = get_summary(db, first.run_id)
    assert run is not None
    assert (run.check, run.status) == ("demo", RunStatus.QUEUED)
    assert actions.cancel_run(ANN, first.run_id) == "cancelled"
    assert entries(db) == [
        ("ann@example.com", "cancelled", f"run {first.run_id}"),
        ("ann@example.com", "requested", f"run {other.run_id}"),
        ("ann@example.com", "requested", f"run {first.run_id}"),
    ]


def test_a_check_that_only_the_file_knows_is_run_as_written(
    furnished: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a button that works only after somebody has applied the file, and an unclear refusal."""
    with pytest.raises(UserError, match="nobody could say what to measure"):
        actions.run_now(ANN, "chat-int8", KEY)
    file = tmp_path / "quantwatch.toml"
    file.write_text(
        'schema_version = 1\n[checks.chat-int8]\nsuite = "core-v1:demo"\n'
        'reference = { model = "org/m" }\ncandidates = [{ name = "int8", model = "org/m8" }]\n'
    )
    monkeypatch.setenv("QUANTWATCH_CONFIG", str(file))

    assert actions.run_now(ANN, "chat-int8", KEY).is_new


@pytest.mark.parametrize(
    ("do", "undo", "names"),
    [
        (lambda: actions.pause(ANN, "demo", " holiday "), lambda: actions.resume(ANN, "demo"),
         ("paused", "resumed")),
        (lambda: actions.pin(ANN, "demo", RUN), lambda: actions.unpin(ANN, "demo"),
         ("baseline.pin", "baseline.unpin")),
    ],
    ids=["pause", "pin"],
)  # fmt: skip
def test_twice_is_once(
    db: Database, do: Callable[[], bool], undo: Callable[[], bool], names: tuple[str, str]
) -> None:
    """Catches a second press that is an error, or is written down as a second change."""
    before = [undo()]
    assert before == [False]
    assert [do(), do(), undo(), undo()] == [True, False, True, False]
    wanted = [("ann@example.com", name, "check demo") for name in reversed(names)]
    assert entries(db) == wanted


def test_acknowledging(db: Database) -> None:
    """Catches an acknowledgement without words, and one that is noted twice."""
    bob = Person("bob@example.com", Role.OPERATOR, How.SIGNED_IN)
    with db.reader() as session:
        (alert,) = (one.id for one in episodes.open_alerts(session))
    with pytest.raises(UserError, match="without a comment"):
        actions.acknowledge(ANN, alert, EPISODE, "  ")

    said = [actions.acknowledge(ANN, alert, EPISODE, words) for words in ("on it", " on it")]
    assert said == [True, False]
    assert actions.acknowledge(bob, alert, EPISODE, "taking over")
    assert entries(db) == [
        ("bob@example.com", "acknowledge", f"alert {alert}"),
        ("ann@example.com", "acknowledge", f"alert {alert}"),
    ]
    with pytest.raises(UserError, match="9999"):
        actions.acknowledge(ANN, 9999, EPISODE, "which?")


def test_only_the_episode_that_was_seen_is_acknowledged(db: Database) -> None:
    """Catches a page left open, by which an alert that nobody has seen is looked after."""
    with db.reader() as session:
        (alert,) = episodes.open_alerts(session)
    with pytest.raises(UserError, match="is over and another one is open; look at that one first"):
        actions.acknowledge(ANN, alert.id, "01A0", "on it")

    assert entries(db) == []
    with db.reader() as session:
        (after,) = episodes.open_alerts(session)
    assert after == alert


def test_settings_of_another_version_are_a_sentence(furnished: str) -> None:
    """Catches an error box after an update, where a field of the applied check is gone."""
    apply_to_demo(furnished, {**CONFIG, "gone_since": 2})
    with pytest.raises(ConfigError, match=r"check demo as it was applied: .*gone_since"):
        actions.run_now(ANN, "demo", KEY)


def test_silencing(db: Database) -> None:
    """Catches two silences of one click, one over everything by oversight, and one without end."""
    first = actions.silence(ANN, {"check": "demo", "rule": None}, HOUR, "moving racks")
    again = actions.silence(ANN, {"check": "demo"}, HOUR, "moving racks ")
    other = actions.silence(ANN, {"check": "demo"}, 2 * HOUR, "moving racks")

    assert first.id == again.id != other.id
    assert dict(first.matcher) == {"check": "demo"}
    assert actions.unsilence(ANN, first.id)
    assert not actions.unsilence(ANN, first.id)
    with db.reader() as session:
        assert [one.id for one in silences.active_silences(session)] == [other.id]
    with pytest.raises(UserError, match="no silence 99 holds now"):
        actions.unsilence(ANN, 99)


@pytest.mark.parametrize(
    ("matcher", "length", "comment", "named"),
    [
        ({"check": ""}, HOUR, "x", "at least one of check, candidate, rule and severity"),
        ({"team": "a"}, HOUR, "x", "no alert has a label 'team'"),
        ({"check": "*"}, timedelta(0), "x", "longer than nothing"),
        ({"check": "*"}, HOUR, " ", "needs a comment"),
    ],
    ids=["nothing to match", "unknown label", "no length", "no comment"],
)
def test_what_is_no_silence(
    furnished: str, matcher: dict[str, str], length: timedelta, comment: str, named: str
) -> None:
    """Catches a silence that hides everything, and a message in which a command line's options stand."""
    with pytest.raises(UserError, match=named):
        actions.silence(ANN, matcher, length, comment)


def test_replaying(furnished: str, db: Database) -> None:
    """Catches a second press that is an error, and a message that is told twice."""
    assert actions.replay(ANN, EVENT) == 1
    assert actions.replay(ANN, EVENT) == 0
    assert actions.replay_dead(ANN, timedelta(days=30)).waiting == 0
    assert ("ann@example.com", "delivery.replay", EVENT) in entries(db)
    with pytest.raises(UserError, match="01JX is no event"):
        actions.replay(ANN, "01JX")


def test_enabling_and_releasing(furnished: str, db: Database) -> None:
    """Catches an audit full of what changed nothing."""
    assert not actions.enable_endpoint(ANN, ENDPOINT)
    endpoint_state(furnished, "disabled")
    assert actions.enable_endpoint(ANN, ENDPOINT)
    assert not actions.enable_endpoint(ANN, ENDPOINT)
    assert actions.release(ANN, QUARANTINED)
    assert not actions.release(ANN, QUARANTINED)
    assert entries(db) == [
        ("ann@example.com", "quarantine lifted", f"check {QUARANTINED}"),
        ("ann@example.com", "endpoint.enable", f"{ENDPOINT}"),
    ]
    endpoint_state(furnished, "removed")
    with pytest.raises(UserError, match="no longer in the configuration"):
        actions.enable_endpoint(ANN, ENDPOINT)
    with pytest.raises(UserError, match="nobody"):
        actions.enable_endpoint(ANN, "nobody")
