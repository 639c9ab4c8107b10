"""The state machine of runs, whole: every state with every event."""

from datetime import timedelta

import pytest

from quantwatch.domain import RunEvent, RunStatus
from quantwatch.domain.lifecycle import (
    TRANSITIONS,
    after_error,
    after_loss,
    backoff,
    sources,
    target,
)

# One column per event; "." is what can't happen. The specification's table, written by hand.
EVENTS = (
    "claim beat prepare measure finalize succeed fail retry release time_out abandon cancel expire"
)
TABLE = """
queued      claimed .          .         .         .          .         .      .      .      .         .         cancelled failed
claimed     .       claimed    preparing .         .          .         failed queued queued timed_out abandoned cancelled .
preparing   .       preparing  .         measuring .          .         failed queued queued timed_out abandoned cancelled .
measuring   .       measuring  .         .         finalizing .         failed queued queued timed_out abandoned cancelled .
finalizing  .       finalizing .         .         .          succeeded failed queued queued timed_out abandoned cancelled .
succeeded   .       .          .         .         .          .         .      .      .      .         .         .         .
failed      .       .          .         .         .          .         .      .      .      .         .         .         .
timed_out   .       .          .         .         .          .         .      .      .      .         .         .         .
cancelled   .       .          .         .         .          .         .      .      .      .         .         .         .
abandoned   .       .          .         .         .          .         .      .      .      .         .         .         .
skipped     .       .          .         .         .          .         .      .      .      .         .         .         .
"""
CELLS = [
    (line.split()[0], event, to)
    for line in TABLE.strip().splitlines()
    for event, to in zip(EVENTS.split(), line.split()[1:], strict=True)
]


@pytest.mark.parametrize(("state", "event", "to"), CELLS, ids=lambda value: value)
def test_every_state_with_every_event(state: str, event: str, to: str) -> None:
    """Catches an ended run that moves again, a step that is skipped, a state nothing leads out of."""
    found = TRANSITIONS.get((RunStatus(state), RunEvent(event)))

    assert (None if to == "." else RunStatus(to)) == found
    assert (to != ".") == (RunStatus(state) in sources(RunEvent(event)))


def test_the_table_is_whole() -> None:
    """Catches a state or an event that the table above doesn't know."""
    assert {(state, event) for state, event, _ in CELLS} == {
        (str(state), str(event)) for state in RunStatus for event in RunEvent
    }


@pytest.mark.parametrize("event", RunEvent)
def test_an_event_leads_to_one_state(event: RunEvent) -> None:
    """Catches an UPDATE that could not say which state it writes."""
    if event is RunEvent.BEAT:
        assert target(event) is None
    else:
        assert {target(event)} == {to for (_, e), to in TRANSITIONS.items() if e is event}


@pytest.mark.parametrize(
    ("retryable", "attempt", "cancelled", "expected"),
    [
        pytest.param(True, 1, False, "retry", id="first-of-three"),
        pytest.param(True, 2, False, "retry", id="second-of-three"),
        pytest.param(True, 3, False, "fail", id="last"),
        pytest.param(False, 1, False, "fail", id="never-helps"),
        pytest.param(True, 1, True, "cancel", id="cancelled-meanwhile"),
    ],
)
def test_what_an_error_means(retryable: bool, attempt: int, cancelled: bool, expected: str) -> None:
    """Catches retries without end, and a cancelled run that comes back after its error."""
    event = after_error(
        retryable=retryable, attempt=attempt, max_attempts=3, cancel_requested=cancelled
    )

    assert expected == event


@pytest.mark.parametrize(
    ("attempt", "cancelled", "expected"),
    [(1, False, "retry"), (2, False, "retry"), (3, False, "abandon"), (1, True, "cancel")],
)
def test_what_a_lost_worker_means(attempt: int, cancelled: bool, expected: str) -> None:
    """Catches a run that is retried for ever, or for somebody who cancelled it (X10, X13)."""
    event = after_loss(attempt=attempt, max_attempts=3, cancel_requested=cancelled)

    assert expected == event


@pytest.mark.parametrize(("attempt", "minutes"), [(0, 1), (1, 1), (2, 5), (3, 15), (9, 15)])
def test_backoff(attempt: int, minutes: int) -> None:
    """Catches attempts that follow each other at once (1, 5, 15 minutes)."""
    assert timedelta(minutes=minutes) == backoff(attempt)
