"""`quantwatch start`: which parts, in which order, on which database and configuration."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sqlalchemy.orm import Session

from quantwatch import __version__
from quantwatch.config.durations import seconds
from quantwatch.config.roots import allowed_roots
from quantwatch.observability import logs, meters, tracing
from quantwatch.scheduler import Scheduler
from quantwatch.service import configuration
from quantwatch.service.configuration import Current, Loaded
from quantwatch.service.delivering import Delivering
from quantwatch.service.exposition import Exposition
from quantwatch.service.health import Health
from quantwatch.service.housekeeping import House, keep
from quantwatch.service.lock import only_scheduler
from quantwatch.service.metrics import MetricsServer
from quantwatch.service.mounts import mount_of
from quantwatch.service.stopping import stop_on_signals
from quantwatch.service.supervisor import Part, Thread, supervise
from quantwatch.store.endings import Trouble
from quantwatch.store.leases import Claim
from quantwatch.store.session import Database
from quantwatch.store.urls import SqliteFile, parse_url
from quantwatch.worker import Children, Pace, Worker
from quantwatch.worker.execution import Execution
from quantwatch.worker.hooks import telling

PARTS = ("scheduler", "worker", "delivery", "metrics")
log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What `quantwatch start` is told."""

    parts: Collection[str] = PARTS
    cache_dir: Path = field(default_factory=Path)
    devices: Sequence[str] = ("cpu",)
    standby: bool = False
    """Don't insist on being the only scheduler of a SQLite file."""


def serve(db: Database, loaded: Loaded, wishes: Wishes) -> None:
    """Run the parts until a stop signal; return when all have ended cleanly.

    Raises StoreError or ConfigError when it can't begin, MonitorError when a part dies.
    """
    current = Current(loaded)
    configuration.declare_labels(loaded.config)
    meters.BUILD_INFO.labels(version=__version__).set(1)
    schedules = "scheduler" in wishes.parts
    with ExitStack() as stack:
        stopping = stack.enter_context(stop_on_signals())
        if schedules and not wishes.standby:
            stack.enter_context(only_scheduler(db))
        if (exporter := tracing.start()) is not None:
            stack.callback(exporter.stop)
        _warn_of_network(db)
        begin(db, loaded, schedules=schedules)
        parts = assemble(db, current, wishes)
        supervise(parts, stopping, seconds(loaded.config.service.shutdown))
    log.info("ended")


def begin(db: Database, loaded: Loaded, *, schedules: bool) -> None:
    """Apply the configuration if this process schedules; another one only uses it."""
    meters.CONFIG_BROKEN.set(0)
    if schedules:
        configuration.apply(db, loaded, f"file:{loaded.path}")
    else:
        configuration.tell((), loaded)
    meters.CONFIG_APPLIED.set_to_current_time()
    log.info("configuration in use", path=str(loaded.path), checks=len(loaded.config.checks))


def assemble(db: Database, current: Current, wishes: Wishes) -> list[Part]:
    """Return the parts in the order in which they start and stop: what begins work stops first."""
    parts: list[Part] = []
    scheduler = Scheduler(db)
    if "scheduler" in wishes.parts:
        parts.append(scheduler)
    if "worker" in wishes.parts:
        # One run per device at a time: as many workers as devices. Each may use all of them,
        # since a run may need several.
        parts += [_worker(db, current, wishes) for _ in wishes.devices]
    delivering = Delivering(db, current) if "delivery" in wishes.parts else None
    parts += [] if delivering is None else [delivering]
    house = House(
        db, current, frozenset(wishes.parts), delivering, leads=lambda: scheduler.is_leader
    )
    parts.append(Thread("housekeeping", partial(keep, house)))
    if "metrics" in wishes.parts:
        parts.append(_metrics(db, current, parts))
    return parts


def _worker(db: Database, current: Current, wishes: Wishes) -> Worker:
    def start(claim: Claim) -> Execution:
        """Use the configuration as it is when the run begins."""
        loaded = current.loaded
        roots = allowed_roots(loaded.config, loaded.folder)
        return Children(db.url, wishes.cache_dir, roots, loaded.config)(claim)

    def tell(session: Session, trouble: Trouble) -> None:
        telling(current.loaded.config)(session, trouble)

    pace = Pace(shutdown_s=float(seconds(current.loaded.config.service.shutdown)))
    return Worker(db, start, devices=wishes.devices, pace=pace, tell=tell)


def _metrics(db: Database, current: Current, parts: Sequence[Part]) -> MetricsServer:
    service = current.loaded.config.service
    exposition = Exposition(db, lambda: current.loaded.config.service.layer_metrics)
    schedules = any(part.name == "scheduler" for part in parts)
    health = Health(db, lambda: parts, schedules=schedules)
    return MetricsServer((service.metrics_address, service.metrics_port), exposition, health)


def _warn_of_network(db: Database) -> None:
    """SQLite's locks and write-ahead log don't work over a network."""
    url = parse_url(db.url)
    if url.get_backend_name() != "sqlite":
        return
    mount = mount_of(SqliteFile.of(url).path.parent)
    if mount is not None and mount.is_network:
        log.warning("the database lies on a network file system; use a local disk", kind=mount.kind)
