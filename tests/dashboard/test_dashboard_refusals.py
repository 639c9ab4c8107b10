"""What the dashboard does not write: without the role, what can't be done, without the right to write."""

import sqlite3
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from tests.dashboard.invented_actions import (
    ENDPOINT,
    EVENT,
    QUARANTINED,
    RUN,
)

from quantwatch.errors import QuantwatchError, StoreError
from quantwatch.store import audit
from quantwatch.store.session import Database, open_database
from quantwatch_dashboard import actions
from quantwatch_dashboard.queries import connection
from quantwatch_dashboard.roles import AccessError, How, Person, Role

ANN = Person("ann@example.com", Role.ADMIN, How.SIGNED_IN)
HOUR = timedelta(hours=1)
KEY = "a key of eight letters or more"
Act = Callable[[Person], Any]


def entries(db: Database) -> list[tuple[str, str, str]]:
    return [(one.actor, one.action, one.subject) for one in audit.list_entries(db)]


ACTIONS: dict[str, tuple[Act, Role]] = {
    "run_now": (lambda p: actions.run_now(p, "demo", KEY), Role.OPERATOR),
    "cancel_run": (lambda p: actions.cancel_run(p, RUN), Role.OPERATOR),
    "pause": (lambda p: actions.pause(p, "demo", "holiday"), Role.OPERATOR),
    "resume": (lambda p: actions.resume(p, "demo"), Role.OPERATOR),
    "pin": (lambda p: actions.pin(p, "demo", RUN), Role.OPERATOR),
    "unpin": (lambda p: actions.unpin(p, "demo"), Role.OPERATOR),
    "acknowledge": (lambda p: actions.acknowledge(p, 1, "01JA", "on it"), Role.OPERATOR),
    "silence": (lambda p: actions.silence(p, {"check": "demo"}, HOUR, "move"), Role.OPERATOR),
    "unsilence": (lambda p: actions.unsilence(p, 1), Role.OPERATOR),
    "replay": (lambda p: actions.replay(p, EVENT), Role.OPERATOR),
    "replay_dead": (lambda p: actions.replay_dead(p, HOUR), Role.ADMIN),
    "enable_endpoint": (lambda p: actions.enable_endpoint(p, ENDPOINT), Role.ADMIN),
    "release": (lambda p: actions.release(p, QUARANTINED), Role.ADMIN),
}


@pytest.mark.parametrize(("act", "needed"), ACTIONS.values(), ids=ACTIONS)
def test_each_action_needs_its_role(monkeypatch: Any, act: Act, needed: Role) -> None:
    """Catches an action for everybody, and one that touches the database before it asks."""
    monkeypatch.setattr(connection, "url", lambda: pytest.fail("the database was asked for"))
    for role in [role for role in Role if role < needed]:
        with pytest.raises(AccessError, match=f"needs the role {needed.word}; bob has"):
            act(Person("bob", role, How.SIGNED_IN))


def test_every_action_is_in_the_table() -> None:
    """Catches a new action that nobody tries without its role."""
    no_action = {"AccessError", "configured"}  # the second one only reads
    assert set(actions.__all__) - no_action == set(ACTIONS)


UNKNOWN = {
    "pause": lambda: actions.pause(ANN, "no-check", "why"),
    "resume": lambda: actions.resume(ANN, "no-check"),
    "unpin": lambda: actions.unpin(ANN, "no-check"),
    "release": lambda: actions.release(ANN, "no-check"),
    "run_now": lambda: actions.run_now(ANN, "no-check", KEY),
    "pin": lambda: actions.pin(ANN, "no-check", RUN),
    "pin an unknown run": lambda: actions.pin(ANN, "demo", "01JX"),
    "pin another check's run": lambda: actions.pin(ANN, "chat-int8", RUN),
    "cancel": lambda: actions.cancel_run(ANN, "01JX"),
    "cancel an ended run": lambda: actions.cancel_run(ANN, RUN),
    "a check in quarantine": lambda: actions.run_now(ANN, QUARANTINED, KEY),
}


@pytest.mark.parametrize("act", UNKNOWN.values(), ids=UNKNOWN)
def test_what_can_not_be_done_is_a_sentence(db: Database, act: Callable[[], object]) -> None:
    """Catches a traceback, a check that was made up by pausing it, and an audit of what never was."""
    with pytest.raises(QuantwatchError) as error:
        act()
    assert len(str(error.value)) > 20
    assert entries(db) == []


def test_a_read_only_database_is_a_clear_message(
    furnished: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches sqlite's own words; reading goes on, and what changes nothing needs no writing."""
    path = furnished.removeprefix("sqlite:///")
    monkeypatch.setenv("QUANTWATCH_DATABASE_URL", f"sqlite:///file:{path}?mode=ro&uri=true")
    assert not actions.resume(ANN, "demo")
    with pytest.raises(StoreError, match="read-only"):
        actions.pause(ANN, "demo", "holiday")


def test_a_locked_database_is_a_clear_message(
    furnished: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an error box when the service is just writing for long."""
    short = open_database(furnished, wait_s=0.05)
    monkeypatch.setattr(connection, "writable", {furnished: short}.__getitem__)
    other = sqlite3.connect(furnished.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(StoreError, match="locked by another process"):
            actions.pause(ANN, "demo", "holiday")
    finally:
        other.close()
    assert actions.pause(ANN, "demo", "holiday")
    short.close()
