"""Retention: short batches between runs, resumable at any point, told exactly beforehand.

A batch is one transaction of at most 5,000 rows or about 200 ms. Each looks first whether a run is
measured or due: then the rest waits for the next call. Nothing is remembered in between; what is
left to do follows from what is there (ADR 0012).
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, func, literal, or_, select, text, tuple_
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningDelete

from quantwatch.config.service import RetentionConfig
from quantwatch.domain import RunStatus
from quantwatch.store import clock
from quantwatch.store.leases import LEASE_S
from quantwatch.store.leftovers import log_tasks, orphan_tasks
from quantwatch.store.lock_order import hold_outbox
from quantwatch.store.pruning import Going, Task, find_going, tier_tasks
from quantwatch.store.rollup import Limits
from quantwatch.store.session import Database
from quantwatch.store.tables import BlockRow, CheckRow, EventRow, RunRow, ScheduleRow
from quantwatch.store.vacuum import give_back

MAX_ROWS = 5000
MAX_BATCH_S = 0.2
BUDGET_S = 5.0
"""How long one `step` works."""

_FIRST_ROWS = 4
_MARGIN = timedelta(minutes=2)
"""No batch starts this shortly before a run is due, or after it was."""
_FIRST_LEASE = timedelta(seconds=LEASE_S)
"""How long a run from before there were leases is taken for alive."""
_ACTIVE = [status.value for status in RunStatus if status.is_active]


@dataclass
class Report:
    """What a step deleted, or a plan would delete, by tier; what is deleted with a row not counted.

    `payload_bytes` counts matrices; `freed_bytes` is what the disk got back. `waiting` names what
    stopped it, `finished` says that nothing was left.
    """

    deleted: Counter[str] = field(default_factory=Counter)
    payload_bytes: int = 0
    freed_bytes: int = 0
    finished: bool = False
    waiting: str | None = None

    def __iadd__(self, other: "Report") -> "Report":
        self.deleted.update(other.deleted)
        self.payload_bytes += other.payload_bytes
        self.freed_bytes += other.freed_bytes
        self.finished, self.waiting = other.finished, other.waiting
        return self


def step(
    db: Database, config: RetentionConfig, *, budget_s: float = BUDGET_S, orphans: bool = False
) -> Report:
    """Delete for about `budget_s` seconds what the limits no longer keep; call it again.

    Names that nobody refers to are looked for after something went, or with `orphans`.
    """
    limits, report = Limits.of(config), Report()
    with db.reader() as session:
        moment = clock.now(session)
        report.waiting = busy(session)
        if report.waiting is not None:
            return report
        going = find_going(session, limits, moment)
        tasks = [*tier_tasks(session, going), *log_tasks(session, limits, moment)]
        tasks = _with_rows(session, tasks)
    # From here: however long looking takes, something is deleted.
    deadline = time.monotonic() + budget_s
    done = _work_off(db, tasks, report, deadline)
    if done and (orphans or report.deleted):
        done = _work_off(db, _existing_orphans(db), report, deadline)
    if report.waiting is None:
        report.freed_bytes = give_back(db, lambda session: busy(session) is None, deadline)
    report.finished = done and time.monotonic() < deadline
    return report


def prune(db: Database, config: RetentionConfig) -> Report:
    """Delete until nothing is left to delete, or a run comes first."""
    report = Report()
    while not report.finished:
        report += step(db, config, orphans=True)
        if report.waiting is not None:
            break
    return report


def plan(db: Database, config: RetentionConfig) -> Report:
    """Return what would be deleted now, exactly, and delete nothing."""
    limits, report = Limits.of(config), Report(finished=True)
    with db.reader() as session:
        moment = clock.now(session)
        going = find_going(session, limits, moment)
        report.waiting = busy(session)
        tasks = [
            *tier_tasks(session, going),
            *log_tasks(session, limits, moment),
            *orphan_tasks(session, going),
        ]
        for task in tasks:
            query = select(func.count(), func.coalesce(func.sum(_size(task)), 0))
            rows, size = session.execute(query.select_from(task.table).where(task.condition)).one()
            _count(report, task, rows, int(size))
    return report


def busy(session: Session) -> str | None:
    """Return which run is measured, waits for a worker or is due, None when there is none."""
    moment = clock.now(session)
    held = or_(
        RunRow.lease_until > moment,
        RunRow.lease_until.is_(None) & (RunRow.started_at > moment - _FIRST_LEASE),
    )
    active = session.scalar(select(RunRow.id).where(RunRow.status.in_(_ACTIVE), held).limit(1))
    if active is not None:
        return f"run {active} is being measured"
    return _due(session, moment)


def next_size(size: int, elapsed_s: float) -> int:
    """Return how many rows the next batch takes, after one of `size` rows took `elapsed_s`."""
    if elapsed_s > MAX_BATCH_S:
        return max(1, size // 2)
    return min(MAX_ROWS, size * 2) if elapsed_s < MAX_BATCH_S / 4 else size


def _unended(session: Session) -> str | None:
    """Like `busy`, and a run whose worker is lost counts, too: it might still write its results."""
    active = session.scalar(select(RunRow.id).where(RunRow.status.in_(_ACTIVE)).limit(1))
    return busy(session) if active is None else f"run {active} has not ended"


def _due(session: Session, moment: datetime) -> str | None:
    """Return the check that a scheduler or worker is about to take up.

    What is overdue for longer is not served by anybody, and must not keep retention waiting.
    """
    near = (moment - _MARGIN, moment + _MARGIN)
    queued = (
        select(CheckRow.name)
        .join(RunRow, RunRow.check_id == CheckRow.id)
        .where(RunRow.status == RunStatus.QUEUED.value, RunRow.not_before.between(*near))
        .where(CheckRow.quarantined_at.is_(None))
    )
    scheduled = (
        select(CheckRow.name)
        .join(ScheduleRow, ScheduleRow.check_id == CheckRow.id)
        .where(ScheduleRow.next_slot_at.is_not(None), ScheduleRow.look_at.between(*near))
        .where(CheckRow.paused_at.is_(None), CheckRow.removed_at.is_(None))
    )
    for query in (queued, scheduled):
        if (name := session.scalar(query.limit(1))) is not None:
            return f"check {name} is due"
    return None


def _work_off(db: Database, tasks: Iterable[Task], report: Report, deadline: float) -> bool:
    """Delete all rows of the tasks; return False when the time was over or a run came first."""
    return all(_work_on(db, task, report, deadline) for task in tasks)


def _work_on(db: Database, task: Task, report: Report, deadline: float) -> bool:
    size = _FIRST_ROWS
    while time.monotonic() < deadline:
        began = time.monotonic()
        rows = _batch(db, task, size, report)
        if rows is None:
            return False
        elapsed = time.monotonic() - began
        # A single name may cost a search of all statistics: then it is cheaper to keep.
        if rows < size or (task.alone and size == 1 and elapsed > MAX_BATCH_S):
            return True
        size = next_size(size, elapsed)
    return False


def _batch(db: Database, task: Task, size: int, report: Report) -> int | None:
    """Delete up to `size` rows in one transaction; None when a run comes first."""
    with db.writer() as session:
        _keep_others_out(session, task)
        report.waiting = _unended(session) if task.alone else busy(session)
        if report.waiting is not None:
            return None
        sizes = session.scalars(_deletion(task, size)).all()
    _count(report, task, len(sizes), sum(sizes))
    return len(sizes)


def _keep_others_out(session: Session, task: Task) -> None:
    """Hold PostgreSQL's other writers for the length of one batch; SQLite has only one anyway.

    Otherwise a baseline pinned at this moment would lose its matrices, and a run that has just
    found a name would refer to nothing. Events go with their deliveries.
    """
    if session.get_bind().dialect.name == "postgresql":
        mode = "run IN SHARE ROW EXCLUSIVE" if task.alone else "baseline_pin IN SHARE"
        session.execute(text(f"LOCK TABLE {mode} MODE"))
    if task.table is EventRow:
        hold_outbox(session)


def _deletion(task: Task, size: int) -> ReturningDelete[int]:
    keys = list(task.table.__table__.primary_key)
    chosen = select(*keys).where(task.condition).limit(size).correlate(None)
    # What somebody is changing now is not waited for (`lock_order`): it is old tomorrow, too.
    chosen = chosen.with_for_update(skip_locked=True)
    key = tuple_(*keys) if len(keys) > 1 else keys[0]
    return delete(task.table).where(key.in_(chosen)).returning(_size(task))


def _size(task: Task) -> ColumnElement[int]:
    return BlockRow.__table__.c.num_bytes if task.table is BlockRow else literal(0)


def _existing_orphans(db: Database) -> list[Task]:
    """Return the kinds of names of which some are unused: looking needs no lock, deleting does."""
    with db.reader() as session:
        return _with_rows(session, orphan_tasks(session, Going()))


def _with_rows(session: Session, tasks: Iterable[Task]) -> list[Task]:
    """Return the tasks that have something to do: an idle step opens no writing transaction."""
    return [
        task
        for task in tasks
        if session.scalar(select(literal(1)).select_from(task.table).where(task.condition).limit(1))
    ]


def _count(report: Report, task: Task, rows: int, size: int) -> None:
    if rows:
        report.deleted[task.tier] += rows
    report.payload_bytes += size
