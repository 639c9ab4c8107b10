"""What ends of runs mean to the alerts: told in the very transaction that ends them."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from quantwatch.config.load import parse
from quantwatch.config.schema import Config
from quantwatch.domain import MODEL, RuleOutcome, RunResult, RunStatus, Severity, Suite
from quantwatch.store import endings
from quantwatch.store.attempts import Failure
from quantwatch.store.leases import Claim
from quantwatch.store.reaper import reap
from quantwatch.store.runs import finish_run
from quantwatch.store.session import Database
from quantwatch.store.tables import EventRow, RuleEvaluationRow
from quantwatch.worker.hooks import settling, telling

Queue = Callable[..., str]
Take = Callable[..., Claim]
Peek = Callable[..., Any]
WRONG = Failure("weights_missing", "weights are gone", "ModelError")

BREACH = RuleOutcome(
    rule="output-kl", candidate="int4", rule_sha="r" * 64, severity=Severity.CRITICAL,
    outcome="breach", enter_runs=1, leave_runs=2, scope=MODEL, value=0.2, value_kind="finite",
    threshold=0.15, words="output KL 0.2 > 0.15",
)  # fmt: skip


@pytest.fixture
def service(tmp_path: Path) -> Config:
    check = {
        "reference": {"model": "./a"},
        "candidates": [{"name": "int4", "model": "./b"}],
        "suite": "core-v1:demo",
    }
    endpoints = {"team": {"url": "https://hooks.example.com/x"}}
    return parse(
        Config, {"schema_version": 1, "checks": {"nightly": check}, "endpoints": endpoints}, "test"
    )


def told(db: Database) -> list[str]:
    with db.reader() as session:
        return [
            str(event.type) for event in session.scalars(select(EventRow).order_by(EventRow.id))
        ]


def test_two_failed_runs_are_told_of(
    db: Database, queue: Queue, take: Take, service: Config
) -> None:
    """Catches trouble that nobody hears of, and one hiccup that wakes somebody (B09)."""
    seen = []
    for _ in range(2):
        queue()
        endings.fail(db, take(), WRONG, telling(service))
        seen.append(told(db))
    assert seen == [[], ["alert.firing"]]


def test_a_retry_is_not_told_of(db: Database, queue: Queue, take: Take, service: Config) -> None:
    """Catches a message about a run that may still succeed."""
    queue()
    for _ in range(2):
        take()
        db.clock_shift += timedelta(seconds=121)
        assert [t.status for t in reap(db, telling(service))] == [RunStatus.QUEUED]
        db.clock_shift += timedelta(minutes=15)
    assert told(db) == []


def test_a_quarantine_is_told_of_at_once(
    db: Database, queue: Queue, take: Take, service: Config
) -> None:
    """Catches a check that is switched off without a word (§6.4, 6)."""
    queue(max_attempts=5)
    for _ in range(3):
        take()
        db.clock_shift += timedelta(seconds=121)
        reap(db, telling(service))
        db.clock_shift += timedelta(minutes=15)
    assert told(db) == ["alert.firing"]


def test_a_check_of_another_service_is_left_to_it(
    db: Database, queue: Queue, take: Take, service: Config
) -> None:
    """Catches a worker that breaks on a check which only another file knows."""
    for _ in range(2):
        queue("foreign")
        endings.fail(db, take(), WRONG, telling(service))
    assert told(db) == []


def test_a_success_is_evaluated_with_its_results(
    db: Database, queue: Queue, take: Take, *,
    service: Config, make_result: Callable[..., RunResult], suite: Suite,
) -> None:  # fmt: skip
    """Catches a run whose results are stored and whose alerts are not, or the other way round."""
    run_id = queue()
    claim = take(to="finalizing")
    result = make_result(run_id=run_id, outcomes=(BREACH,))
    settle = settling(service)
    check = service.checks["nightly"]

    def broken(session: Any, given: RunResult) -> None:
        settle(session, given, check)
        raise RuntimeError("killed here")

    with pytest.raises(RuntimeError, match="killed here"):
        finish_run(db, result, suite, (), lease=claim.token, then=broken)
    with db.reader() as session:
        assert session.scalars(select(RuleEvaluationRow)).all() == []
    finish_run(db, result, suite, (), lease=claim.token, then=lambda s, r: settle(s, r, check))
    with db.reader() as session:
        (evaluation,) = session.scalars(select(RuleEvaluationRow)).all()
        assert evaluation.run_id == run_id
