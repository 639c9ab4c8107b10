"""How large the database is by table and tier, how fast it grows, and when its disk is full."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from quantwatch.config.service import RetentionConfig
from quantwatch.domain import RunStatus
from quantwatch.errors import StoreError
from quantwatch.store import clock, disk
from quantwatch.store.pruning import PROMPT_KINDS, TOKEN_KINDS
from quantwatch.store.rollup import Limits
from quantwatch.store.session import Database
from quantwatch.store.tables import Base, BlockRow, RunCandidateRow, RunRow

TOKENS, PROMPTS, LAYERS = "token matrices", "prompt sums", "layer statistics"
RUNS, LOGS, NAMES = "runs", "logs", "names"
_TIER = {
    **dict.fromkeys(("measurement", "noise_floor", "alert_scope"), LAYERS),
    **dict.fromkeys(("run", "run_candidate", "rule_evaluation", "episode"), RUNS),
    **dict.fromkeys(("attribution", "attribution_part", "detectable", "canary"), RUNS),
    **dict.fromkeys(("run_attempt", "event", "delivery", "delivery_attempt"), LOGS),
    **dict.fromkeys(("failed_task", "audit", "trigger_key", "silence", "component"), LOGS),
    **dict.fromkeys(("kernel_batch", "kernel_case", "kernel_speed"), LOGS),
}
_WINDOW = timedelta(days=30)
_WEEK = 7.0


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes on disk with indexes, and rows. `name` is a table's or a tier's."""

    name: str
    num_bytes: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Flow:
    """A tier that grows by so many bytes a day, until retention takes away as much."""

    tier: str
    bytes_per_day: float
    days_left: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a database. What a server does not tell of its disk is None."""

    tables: tuple[Size, ...]
    tiers: tuple[Size, ...]
    total_bytes: int
    reusable_bytes: int
    """Free pages inside a SQLite file."""
    free_disk_bytes: int | None
    flows: tuple[Flow, ...]

    @property
    def bytes_per_day(self) -> float:
        """By how much it grows now."""
        return sum(flow.bytes_per_day for flow in self.flows if flow.days_left > 0)

    @property
    def full_in_days(self) -> float | None:
        """When the disk is full; None when it never is, or is not known."""
        if self.free_disk_bytes is None:
            return None
        return full_in_days(self.flows, self.free_disk_bytes + self.reusable_bytes)


@dataclass(frozen=True, slots=True)
class _History:
    """What was stored of late: succeeded runs a day, by how many checks, since how many days."""

    runs_per_day: float
    num_checks: int
    age_days: float


def read_sizes(db: Database, config: RetentionConfig) -> Sizes:
    """Measure the database; on SQLite this reads all of it. Raises StoreError without `dbstat`."""
    with db.reader() as session:
        tables = tuple(sorted(_tables(session, db), key=lambda size: -size.num_bytes))
        tiers = tuple(_tiers(session, tables))
        history = _history(session, clock.now(session))
        flows = () if history is None else tuple(_flows(session, tiers, history, config))
        total, reusable = total_bytes(session), _reusable(session)
    found = disk.space(db)
    return Sizes(tables, tiers, total, reusable, None if found is None else found.free, flows)


def full_in_days(flows: Iterable[Flow], free_bytes: float) -> float | None:
    """Return after how many days the flows have filled the free bytes; None if they never do."""
    known = sorted(flows, key=lambda flow: flow.days_left)
    day, left = 0.0, float(free_bytes)
    for index, flow in enumerate(known):
        rate = sum(other.bytes_per_day for other in known[index:])
        used = rate * (flow.days_left - day) if rate else 0.0
        if used >= left:
            return day + left / rate
        day, left = flow.days_left, left - used
    return None


def _flows(
    session: Session, tiers: Sequence[Size], history: _History, config: RetentionConfig
) -> Iterable[Flow]:
    """Yield how each tier grows. What is kept per run is taken as the same for every run."""
    limits, size = Limits.of(config), {tier.name: tier for tier in tiers}
    nightly, age = history.runs_per_day, history.age_days

    def rate(tier: str, runs: int) -> float:
        return size[tier].num_bytes / runs * nightly if runs else 0.0

    def left(limit: timedelta) -> float:
        return max(0.0, limit / timedelta(days=1) - age)

    num_runs = _num_succeeded(session)
    with_tokens, with_prompts = _num_with(session, TOKEN_KINDS), _num_with(session, PROMPT_KINDS)
    missing = max(0, limits.token_runs * history.num_checks - with_tokens)
    yield Flow(TOKENS, rate(TOKENS, with_tokens), missing / nightly)
    yield Flow(PROMPTS, rate(PROMPTS, with_prompts), left(limits.prompts))
    layers = rate(LAYERS, num_runs)
    weekly = min(1.0, history.num_checks / _WEEK / nightly)
    yield Flow(LAYERS, layers * (1 - weekly), left(limits.statistics))
    yield Flow(LAYERS, layers * weekly, left(limits.runs))
    yield Flow(RUNS, rate(RUNS, num_runs), left(limits.runs))
    yield Flow(LOGS, rate(LOGS, num_runs), left(limits.logs))


def _tiers(session: Session, tables: Sequence[Size]) -> Iterable[Size]:
    """Yield the tables put together; blocks are divided by what they hold."""
    sums: dict[str, tuple[int, int]] = dict.fromkeys(
        (TOKENS, PROMPTS, LAYERS, RUNS, LOGS, NAMES), (0, 0)
    )
    for table in tables:
        if table.name != BlockRow.__tablename__:
            size, rows = sums[_TIER.get(table.name, NAMES)]
            sums[_TIER.get(table.name, NAMES)] = (size + table.num_bytes, rows + table.num_rows)
    whole = next((t.num_bytes for t in tables if t.name == BlockRow.__tablename__), 0)
    payload = _payload(session)
    total = sum(size for size, _ in payload.values())
    for tier, (size, rows) in payload.items():
        sums[tier] = (whole * size // total if total else 0, rows)
    yield from (Size(tier, size, rows) for tier, (size, rows) in sums.items())


def _payload(session: Session) -> dict[str, tuple[int, int]]:
    """Return the bytes and number of blocks by tier."""
    counted = session.execute(
        select(BlockRow.kind, func.sum(BlockRow.num_bytes), func.count()).group_by(BlockRow.kind)
    )
    sums = {TOKENS: (0, 0), PROMPTS: (0, 0)}
    for kind, size, rows in counted:
        tier = PROMPTS if kind in PROMPT_KINDS else TOKENS
        sums[tier] = (sums[tier][0] + int(size), sums[tier][1] + rows)
    return sums


def _tables(session: Session, db: Database) -> Iterable[Size]:
    size_of = _postgres_bytes if db.engine.dialect.name == "postgresql" else _sqlite_bytes
    sizes = size_of(session, db)
    for table in Base.metadata.sorted_tables:
        rows = session.scalar(select(func.count()).select_from(table)) or 0
        yield Size(table.name, sizes.get(table.name, 0), rows)


def _sqlite_bytes(session: Session, db: Database) -> dict[str, int]:
    modules = session.execute(text("SELECT name FROM pragma_module_list WHERE name = 'dbstat'"))
    if modules.first() is None:
        raise StoreError(
            f"Database {db.name}: this build of SQLite can't tell sizes by table (no dbstat)."
        )
    query = (
        "SELECT master.tbl_name, SUM(stat.pgsize) FROM dbstat AS stat"
        " JOIN sqlite_master AS master ON master.name = stat.name"
        " WHERE stat.aggregate = TRUE GROUP BY master.tbl_name"
    )
    return {name: int(size) for name, size in session.execute(text(query))}


def _postgres_bytes(session: Session, _db: Database) -> dict[str, int]:
    query = "SELECT relname, pg_total_relation_size(relid) FROM pg_stat_user_tables"
    return {name: int(size) for name, size in session.execute(text(query))}


def total_bytes(session: Session) -> int:
    """Return how large the database is, without reading it."""
    if session.get_bind().dialect.name == "postgresql":
        query = "SELECT pg_database_size(current_database())"
        return int(session.execute(text(query)).scalar_one())
    return _pragma(session, "page_count") * _pragma(session, "page_size")


def _reusable(session: Session) -> int:
    if session.get_bind().dialect.name == "postgresql":
        return 0
    return _pragma(session, "freelist_count") * _pragma(session, "page_size")


def _pragma(session: Session, name: str) -> int:
    return int(session.execute(text(f"PRAGMA {name}")).scalar_one())


def _history(session: Session, moment: datetime) -> _History | None:
    """Return what happened in the last 30 days; None before a day has passed with any run."""
    good = RunRow.status == RunStatus.SUCCEEDED.value
    first = session.scalar(select(func.min(RunRow.started_at)).where(good))
    if first is None or moment - first < timedelta(days=1):
        return None
    window = min(_WINDOW, moment - first)
    recent = select(func.count(), func.count(RunRow.check_id.distinct())).where(
        good, RunRow.started_at > moment - window
    )
    runs, checks = session.execute(recent).one()
    day = timedelta(days=1)
    return _History(runs / (window / day), checks, (moment - first) / day) if runs else None


def _num_succeeded(session: Session) -> int:
    query = select(func.count()).where(RunRow.status == RunStatus.SUCCEEDED.value)
    return session.scalar(query) or 0


def _num_with(session: Session, kinds: tuple[str, ...]) -> int:
    owners = select(BlockRow.run_candidate_id).where(BlockRow.kind.in_(kinds)).distinct()
    query = select(func.count(RunCandidateRow.run_id.distinct()))
    return session.scalar(query.where(RunCandidateRow.id.in_(owners))) or 0
