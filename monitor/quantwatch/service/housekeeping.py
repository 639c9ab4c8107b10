"""What comes back in every service: the file, alerts, lost runs, old data, signs of life."""

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from quantwatch.errors import QuantwatchError, StoreError
from quantwatch.observability import logs, meters
from quantwatch.pipeline.alerting import watch
from quantwatch.service.chores import Chore, keep_house
from quantwatch.service.configuration import Current, FileWatch, reload
from quantwatch.service.delivering import Delivering
from quantwatch.service.ping import DeadManPing
from quantwatch.store import retention
from quantwatch.store.components import Component, note_gone, note_seen
from quantwatch.store.reaper import REAP_EVERY_S, reap
from quantwatch.store.session import Database
from quantwatch.telemetry import new_run_id
from quantwatch.worker.hooks import telling

LOOK_AT_FILE_S = 5.0
WATCH_ALERTS_S = 60.0
RETENTION_S = 60.0
PING_S = 15.0
SHOW_S = 15.0
log = logs.get(__name__)


@dataclass
class House:
    """What the chores of one process share."""

    db: Database
    current: Current
    parts: frozenset[str]
    delivering: Delivering | None = None
    leads: Callable[[], bool] = lambda: False
    """Whether this process is the one of all that schedules."""
    trouble: str | None = None
    """What is wrong with the file, while the configuration before it is kept."""
    id: str = field(default_factory=lambda: f"service-{new_run_id()}")

    @property
    def schedules(self) -> bool:
        """Whether this process applies the configuration and looks after what all share."""
        return "scheduler" in self.parts


def chores(house: House) -> list[Chore]:
    """Return what this process does: what all processes share is left to those that schedule."""
    loaded = house.current.loaded
    file = FileWatch(loaded.path, loaded.digest)
    found = [
        Chore("configuration", LOOK_AT_FILE_S, partial(look_at_file, house, file)),
        Chore("signs of life", SHOW_S, partial(show, house)),
    ]
    if house.schedules:
        ping = DeadManPing(house.db, lambda: house.current.loaded.dead_man, house.leads)
        found += [
            Chore("dead-man URL", PING_S, ping),
            Chore("alerts", WATCH_ALERTS_S, partial(watch_alerts, house)),
            Chore("retention", RETENTION_S, partial(delete_old, house)),
        ]
        if "worker" not in house.parts:
            # A worker does it itself; without any, runs would stay active for ever.
            found.append(Chore("lost runs", REAP_EVERY_S, partial(reap_lost, house)))
    return found


def look_at_file(house: House, file: FileWatch) -> None:
    """Take over a changed file; a broken one keeps the configuration before it, and is shown."""
    if not file.changed():
        return
    house.trouble = reload(house.db, house.current, writes=house.schedules)
    # Only now: when the database was away, the next look tries again.
    file.handled()
    meters.CONFIG_BROKEN.set(house.trouble is not None)
    if house.trouble is None:
        meters.CONFIG_APPLIED.set_to_current_time()
        if house.delivering is not None:
            house.delivering.refresh()
    show(house)


def show(house: House) -> None:
    """Show people which processes there are, with which configuration, and what troubles them."""
    details = {
        "parts": sorted(house.parts),
        "config": str(house.current.loaded.path),
        "config_trouble": house.trouble,
    }
    component = Component(house.id, "service", socket.gethostname(), os.getpid())
    with house.db.writer() as session:
        note_seen(session, component, details)


def keep(house: House, stopping: threading.Event) -> None:
    """Do the chores until told to stop, then take this process off the list."""
    keep_house(chores(house), stopping)
    try:
        with house.db.writer() as session:
            note_gone(session, [house.id])
    except StoreError as error:
        log.warning("can't sign off", why=str(error))


def watch_alerts(house: House) -> None:
    """Look after what no run does: dead-man, silences that end, reminders."""
    _told(lambda: watch(house.db, house.current.loaded.config), "alerts")


def delete_old(house: House) -> None:
    """Delete for a few seconds what the limits no longer keep, when nothing is measured or due."""
    report = retention.step(house.db, house.current.loaded.config.retention)
    if report.deleted:
        log.info("old results deleted", freed_bytes=report.freed_bytes, rows=dict(report.deleted))


def reap_lost(house: House) -> None:
    """End or queue again the runs whose worker is gone."""
    for trouble in reap(house.db, telling(house.current.loaded.config)):
        log.warning("run had no worker", run=trouble.run_id, status=trouble.status.value)


def _told(look: Callable[[], int], what: str) -> None:
    """One check that can't be looked after does not end the service."""
    try:
        num = look()
    except QuantwatchError as error:
        log.error(f"{what} can't be looked after", error)
        return
    if num:
        log.info("messages written", messages=num)
