"""Kernel cases and speeds come back as they were written, on both databases."""

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select

from quantwatch.config.service import RetentionConfig
from quantwatch.errors import StoreError
from quantwatch.store import kernels, retention
from quantwatch.store.kernels import KernelBatch, KernelCase, KernelSpeed
from quantwatch.store.session import Database
from quantwatch.store.tables import KernelBatchRow, KernelCaseRow

START = datetime(2026, 11, 29, 2, 0, tzinfo=UTC)
BATCH = KernelBatch(
    id="01A",
    kind="test",
    device="cpu",
    git_sha="abc",
    environment={"cpu": {"threads": 1}},
    started_at=START,
    finished_at=START + timedelta(seconds=9),
    num_passed=1,
    num_failed=2,
    num_not_applicable=1,
)
CASE = KernelCase(
    operator="int8_linear",
    backend="aten",
    variant="int8-channel",
    shape=(1, 64, 576),
    dtype="bfloat16",
    layout="strided",
    status="passed",
    error=1.25e-4,
    tolerance=1.4e-3,
    message="",
    fallbacks=(("dequantized", "65 inputs", 3),),
)
SPEED = KernelSpeed(
    operator="int4_linear",
    backend="aten",
    variant="int4-g64",
    shape=(16, 1536, 576),
    dtype="bfloat16",
    ratio=3.1,
    ratio_low=2.9,
    ratio_high=3.2,
    seconds=1e-4,
    baseline_seconds=3.1e-4,
    rounds=40,
    threads=1,
    message="",
)


def test_cases_survive(db: Database) -> None:
    """Catches shapes that come back as lists, and errors that aren't finite, which become NULL."""
    cases = [
        CASE,
        replace(CASE, status="failed", error=math.inf, message="off by inf, allowed 0.001"),
        replace(CASE, status="failed", error=None, message="IndexError: \0"),
        replace(CASE, status="not applicable", fallbacks=()),
    ]
    kernels.insert_cases(db, BATCH, cases)
    found = kernels.cases_of(db, "01A")
    assert found == [*cases[:2], replace(cases[2], message="IndexError: \\x00"), cases[3]]
    assert kernels.list_batches(db, "test") == [BATCH]
    assert kernels.list_batches(db, "bench") == []


def test_speeds_survive(db: Database) -> None:
    """Catches an interval whose ends change places."""
    kernels.insert_speeds(db, replace(BATCH, kind="bench"), [SPEED])
    assert kernels.speeds_of(db, "01A") == [SPEED]


def test_an_unknown_batch_is_an_error(db: Database) -> None:
    """Catches an empty list for a batch that isn't there."""
    with pytest.raises(StoreError, match="01Z"):
        kernels.cases_of(db, "01Z")


def test_the_newest_batches_stay(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a table that grows for ever, and one that drops the newest or the other kind."""
    monkeypatch.setattr(kernels, "KEPT", 2)
    kernels.insert_speeds(db, replace(BATCH, id="bench", kind="bench"), [SPEED])
    for number in range(4):
        started = START + timedelta(hours=number)
        kernels.insert_cases(db, replace(BATCH, id=f"{number}", started_at=started), [CASE])
    assert [batch.id for batch in kernels.list_batches(db, "test")] == ["3", "2"]
    assert len(kernels.list_batches(db, "bench")) == 1
    with db.reader() as session:
        assert session.scalar(select(func.count()).select_from(KernelCaseRow)) == 2


def test_retention_keeps_their_environment(db: Database) -> None:
    """Catches an environment that no run refers to and that a batch still needs."""
    kernels.insert_cases(db, BATCH, [CASE])
    retention.step(db, RetentionConfig(), orphans=True)
    assert kernels.list_batches(db, "test")[0].environment == BATCH.environment


def test_a_batch_is_written_whole_or_not_at_all(db: Database) -> None:
    """Catches half a batch, which would look like a short grid."""
    with pytest.raises(StoreError):
        kernels.insert_cases(db, BATCH, [CASE, replace(CASE, status=None)])  # type: ignore[arg-type]
    with db.reader() as session:
        assert session.scalar(select(func.count()).select_from(KernelBatchRow)) == 0
