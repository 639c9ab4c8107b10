"""Canaries and minimum effects come back as they were written; which run has to carry one."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, func, select, update

from quantwatch.domain import Canary, Detectable, RunResult, Scope
from quantwatch.store import canaries, clock, confirmations, queue
from quantwatch.store.detectables import detectables_of
from quantwatch.store.reading import read_results
from quantwatch.store.runs import get_result
from quantwatch.store.session import Database
from quantwatch.store.tables import CanaryRow, DetectableRow, RunRow

Save = Callable[..., RunResult]
AT = datetime(2026, 11, 30, 2, 10, tzinfo=UTC)
FOUND = Canary(
    candidate="int8", of="candidate", turn=0, fault="channel", size=0.01,
    place=Scope("layers.1.mlp.up_proj"), channel=17, made_at=AT, seconds=4.5, state="measured",
    found=True, located=True, named=Scope("layers.1"), rule="isolated-error-outlier",
    scope=Scope("layers.1"), value=0.02, threshold=0.01,
)  # fmt: skip
MISSED = replace(
    FOUND, found=False, located=False, named=None, rule=None, scope=None, value=None,
    threshold=None, reason="isolated error at layers.1.mlp.up_proj: 0.01 → 0.0101",
)  # fmt: skip
NOTHING = replace(
    MISSED, state="not measurable", found=None, located=None, place=None, channel=None,
    reason="streamed",
)  # fmt: skip
EFFECTS = (
    Detectable("kl", "logit_kl", "mean", Scope("model"), 1, 0.01, 0.02, 0.0125, 0.8),
    Detectable("top1", "top1_agreement", "p99", None, 0, None, None, None, 0.8, "no baseline"),
)


def fly(db: Database, run_id: str, canary: Canary) -> None:
    with db.writer() as session:
        canaries.save_canary(session, run_id, canary)


@pytest.mark.parametrize("canary", [FOUND, MISSED, NOTHING], ids=["found", "missed", "nothing"])
def test_round_trip(db: Database, save: Save, canary: Canary) -> None:
    """Catches a field that is lost, and a canary of another check."""
    run = save()
    fly(db, run.run_id, canary)
    fly(db, save(check="other").run_id, replace(FOUND, turn=7))
    assert canaries.canary_of_run(db, run.run_id) == canary
    (flown,) = canaries.canaries_of(db, "nightly", 9)
    assert (flown.check, flown.run_id, flown.canary) == ("nightly", run.run_id, canary)


def test_the_newest(db: Database, save: Save) -> None:
    """Catches the oldest one, one of every check together, and what could not be measured."""
    ids = [save(days).run_id for days in range(3)]
    for turn, (run_id, canary) in enumerate(zip(ids, (FOUND, MISSED, NOTHING), strict=True)):
        fly(db, run_id, replace(canary, turn=turn))
    fly(db, save(check="other").run_id, replace(FOUND, turn=0))
    assert [each.canary.turn for each in canaries.canaries_of(db, "nightly", 2)] == [2, 1]
    newest = {each.check: each.canary.turn for each in canaries.newest_canaries(db)}
    assert newest == {"nightly": 2, "other": 0}
    with db.reader() as session:
        check_id = session.scalars(select(RunRow.check_id).where(RunRow.id == ids[0])).one()
        last = canaries.last_measured(session, check_id)
    assert last is not None
    assert (last.run_id, last.canary.turn) == (ids[1], 1)


def test_it_goes_with_its_run(db: Database, save: Save) -> None:
    """Catches rows of runs that retention has deleted."""
    bare = save().candidates[0]
    told = (replace(bare, detectable=EFFECTS),)
    run, kept = save(1, candidates=told, alerts=()), save(2, candidates=told, alerts=())
    for each in (run, kept):
        fly(db, each.run_id, FOUND)
    with db.writer() as session:
        session.execute(delete(RunRow).where(RunRow.id == run.run_id))
    with db.reader() as session:
        counts = [
            session.scalar(select(func.count()).select_from(t)) for t in (CanaryRow, DetectableRow)
        ]
    assert counts == [1, len(EFFECTS)]
    assert canaries.canary_of_run(db, kept.run_id) == FOUND


def test_minimum_effects_come_back(db: Database, save: Save) -> None:
    """Catches effects of another candidate, in another order, or without their reason."""
    first, second = save().candidates
    run = save(1, candidates=(first, replace(second, detectable=EFFECTS)))
    assert get_result(db, run.run_id) == run
    assert detectables_of(db, run.run_id) == [(second.name, EFFECTS)]
    with db.reader() as session:
        part = read_results(session, [run.run_id], metric="logit_kl")[run.run_id]
    assert [each.detectable for each in part.candidates] == [(), ()]


def asked(db: Database, **fields: Any) -> str:
    new = queue.NewRun("nightly", fields.pop("slot_key", "s:1"), {}, "/somewhere", **fields)
    with db.writer() as session:
        run_id = queue.enqueue(session, new)
    assert run_id is not None
    return run_id


def test_which_run_is_due(db: Database, save: Save) -> None:
    """Catches two in one night, the same turn twice, one in a confirmation or by hand."""
    assert canaries.due(db, "no such run", 60) is None
    assert canaries.due(db, save().run_id, 60) is None  # of the command line
    run_id = asked(db, trigger="schedule")
    first = canaries.due(db, run_id, 3600)
    assert first == canaries.Due(0, "s:1", None, 0)
    with db.writer() as session:
        now = clock.now(session)
        values = {"attempt": 2, "deadline_at": now + timedelta(seconds=100)}
        session.execute(update(RunRow).where(RunRow.id == run_id).values(values))
    fly(db, run_id, replace(FOUND, made_at=now))
    assert canaries.due(db, run_id, 3600) is None
    db.clock_shift += timedelta(hours=1)
    second = canaries.due(db, run_id, 3600)
    assert second is not None
    assert (second.turn, second.attempt) == (1, 2)
    assert second.left_s == pytest.approx(100 - 3600, abs=5)
    with db.writer() as session:
        confirming = confirmations.queue_confirmation(session, run_id)
    assert confirming is not None
    assert canaries.due(db, confirming, 3600) is None
