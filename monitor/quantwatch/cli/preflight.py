"""What deployments forget: `quantwatch doctor --preflight`. Each probe names its fix."""

import os
import resource
import shutil
import tempfile
import zoneinfo
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from quantwatch.cli.probes import Finding
from quantwatch.cli.session import Session, cache_dir
from quantwatch.errors import QuantwatchError
from quantwatch.report.numbers import plural
from quantwatch.service import cgroup
from quantwatch.service.mounts import mount_of
from quantwatch.store.disk import Room, Space, space_at

if TYPE_CHECKING:
    from quantwatch.store.session import Database

_FEW_FILES, _FEW_PIDS = 1024, 256
_LITTLE_MEMORY, _LITTLE_SHM = 2e9, 64e6
_CLOCK_WARN_S, _CLOCK_BROKEN_S = 2.0, 60.0


def preflight(session: Session) -> list[Finding]:
    """Look at quotas, disks, mounts, clock and rights; whatever can't be asked says why."""
    probes: dict[str, Callable[[], list[Finding]]] = {
        "disk": lambda: [_disk(name, place) for name, place in _places(session).items()],
        "mount": lambda: [_mount(name, place) for name, place in _places(session).items()],
        "file descriptors": lambda: [files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])],
        "memory limit": lambda: [memory(cgroup.limits())],
        "processes": lambda: [processes(cgroup.limits())],
        "processors": lambda: [processors(cgroup.limits(), _threads())],
        "shared memory": lambda: [_shared_memory()],
        "time zones": lambda: [_zones(session)],
        "clock": lambda: [_clock(session)],
        "database rights": lambda: [_rights(session)],
    }
    fix = f"run: {session.program} db upgrade"
    return [finding for name, probe in probes.items() for finding in _looked(name, probe, fix)]


def _looked(name: str, probe: Callable[[], list[Finding]], fix: str) -> list[Finding]:
    try:
        return probe()
    except _NoDatabaseError:
        return [Finding(name, "warn", "there is no database yet", fix)]
    except QuantwatchError as error:
        return [Finding(name, "broken", str(error), "see database above")]
    except OSError as error:
        return [Finding(name, "broken", str(error), "make it readable, then look again")]


def _places(session: Session) -> dict[str, Path]:
    """Return the folders that are written to."""
    places = {"cache": cache_dir(), "temporary files": Path(tempfile.gettempdir())}
    if (file := _sqlite_file(session)) is not None:
        places = {"database": file.parent, **places}
    return {name: _existing(place) for name, place in places.items()}


def _sqlite_file(session: Session) -> Path | None:
    from quantwatch.store.urls import SqliteFile, parse_url

    url = parse_url(session.database_url())
    return SqliteFile.of(url).path if url.get_backend_name() == "sqlite" else None


def _existing(place: Path) -> Path:
    return next(each for each in (place, *place.parents) if each.exists())


def _disk(name: str, place: Path) -> Finding:
    return disk(name, place, space_at(place))


def disk(name: str, place: Path, space: Space) -> Finding:
    """Judge how much of a disk is free."""
    text = f"{space.free / 1e9:.1f} GB ({space.free_ratio:.0%}) free at {place}"
    if space.room is Room.ENOUGH:
        return Finding(f"disk: {name}", "ok", text)
    fix = "free some space, or shorten [retention]; below 3 % and 2 GB nothing is measured"
    return Finding(f"disk: {name}", "broken" if space.room is Room.NONE else "warn", text, fix)


def _mount(name: str, place: Path, table: str | None = None) -> Finding:
    """Judge the file system of a place; SQLite's locks don't work over the network."""
    title, mount = f"mount: {name}", mount_of(place, table)
    if mount is None:
        return Finding(title, "ok", f"{place}: this system does not tell its mounts")
    text = f"{place} on {mount.kind}"
    if mount.is_read_only or not os.access(place, os.W_OK):
        return Finding(title, "broken", f"{text}, read-only", f"mount a writable volume at {place}")
    if mount.is_network and name == "database":
        fix = "put the SQLite file on a local disk, or use PostgreSQL"
        return Finding(title, "broken", f"{text}, a network file system", fix)
    return Finding(title, "ok", text)


def files(soft: int) -> Finding:
    """Judge how many files may be open at once."""
    text = "unlimited" if soft < 0 else f"{soft}"
    if 0 <= soft < _FEW_FILES:
        return Finding("file descriptors", "warn", text, "raise it: ulimit -n 4096 (LimitNOFILE)")
    return Finding("file descriptors", "ok", text)


def memory(limits: cgroup.Limits) -> Finding:
    """Judge the memory that the container may use."""
    if limits.memory_bytes is None:
        return Finding("memory limit", "ok", "no limit of a container")
    text = f"{limits.memory_bytes / 1e9:.1f} GB for this container"
    if limits.memory_bytes < _LITTLE_MEMORY:
        fix = "raise the container's memory: the demo model alone needs about 2 GB"
        return Finding("memory limit", "warn", text, fix)
    return Finding("memory limit", "ok", text)


def processes(limits: cgroup.Limits) -> Finding:
    """Judge how many threads may be started: torch ends the process when it can't start one."""
    if limits.pids is None:
        return Finding("processes", "ok", "no limit of a container")
    if limits.pids < _FEW_PIDS:
        fix = "raise the container's pids limit to 512"
        return Finding("processes", "warn", f"at most {plural(limits.pids, 'thread')}", fix)
    return Finding("processes", "ok", f"at most {plural(limits.pids, 'thread')}")


def _compute(threads: int) -> str:
    return plural(threads, "thread computes", "threads compute")


def processors(limits: cgroup.Limits, threads: int) -> Finding:
    """Judge whether more threads compute than the container has processors' time for."""
    if limits.cpus is None:
        return Finding("processors", "ok", f"no quota; {_compute(threads)}")
    text = f"{limits.cpus:g} processor{'' if limits.cpus == 1 else 's'}, {_compute(threads)}"
    if threads > limits.cpus + 0.5:
        fix = f"set OMP_NUM_THREADS={max(1, int(limits.cpus))}: more threads only wait"
        return Finding("processors", "warn", text, fix)
    return Finding("processors", "ok", text)


def _threads() -> int:
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() else os.cpu_count() or 1


def _shared_memory() -> Finding:
    place = Path("/dev/shm")
    if not place.exists():
        return Finding("shared memory", "ok", "this system has no /dev/shm")
    size = shutil.disk_usage(place).total
    text = f"{size / 1e6:.0f} MB at {place}"
    if size <= _LITTLE_SHM:
        fix = "give the container more: shm_size: 1gb"
        return Finding("shared memory", "warn", f"{text}, a container's default", fix)
    return Finding("shared memory", "ok", text)


def _zones(session: Session) -> Finding:
    names = {"Europe/Berlin", *_configured_zones(session)}
    missing = sorted(name for name in names if not _is_zone(name))
    text = f"tzdata {version('tzdata')}, {len(zoneinfo.available_timezones())} zones"
    if missing:
        fix = "pip install --upgrade tzdata, or install the system's tzdata"
        return Finding("time zones", "broken", f"{text}; missing: {', '.join(missing)}", fix)
    return Finding("time zones", "ok", text)


def _configured_zones(session: Session) -> set[str]:
    if session.find_config() is None:
        return set()
    schedules = [check.schedule for check in session.config()[0].checks.values()]
    return {schedule.zone for schedule in schedules if schedule is not None}


def _is_zone(name: str) -> bool:
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


def _clock(session: Session) -> Finding:
    from quantwatch.store.rights import clock_of

    with _database(session) as database:
        before = datetime.now(UTC)
        told = clock_of(database)
        after = datetime.now(UTC)
    return clock_finding((told - (before + (after - before) / 2)).total_seconds())


def clock_finding(ahead_s: float) -> Finding:
    """Judge how far the database's clock is from ours: leases and slots go by the database's."""
    text = f"the database's clock is {ahead_s:+.1f} s from this machine's"
    if abs(ahead_s) <= _CLOCK_WARN_S:
        return Finding("clock", "ok", text)
    fix = "keep both machines' clocks by NTP (chronyd, systemd-timesyncd)"
    return Finding("clock", "broken" if abs(ahead_s) > _CLOCK_BROKEN_S else "warn", text, fix)


def _rights(session: Session) -> Finding:
    from quantwatch.store.rights import try_rights

    try:
        with _database(session) as database:
            try_rights(database)
    except QuantwatchError as error:
        fix = "grant CREATE and write rights, or make the file and its folder writable"
        return Finding("database rights", "broken", str(error), fix)
    return Finding("database rights", "ok", "tables can be made and written to")


class _NoDatabaseError(Exception):
    """There is nothing to ask yet."""


@contextmanager
def _database(session: Session) -> "Iterator[Database]":
    from quantwatch.store.session import open_database

    if (file := _sqlite_file(session)) is not None and not file.exists():
        raise _NoDatabaseError
    database = open_database(session.database_url(), check_schema=False)
    try:
        yield database
    finally:
        database.close()
