"""`quantwatch db prune` and `db sizes`: what goes, what is there, and when the disk is full."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantwatch.cli.options import AsJson
from quantwatch.cli.output import show, show_json, table
from quantwatch.cli.session import Session
from quantwatch.cli.streams import say, whisper
from quantwatch.errors import StoreError

if TYPE_CHECKING:
    from quantwatch.config.service import RetentionConfig
    from quantwatch.store.retention import Report
    from quantwatch.store.sizes import Sizes

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would go, exactly.")]


def prune(context: typer.Context, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Delete what [retention] no longer keeps, in short batches between runs.

    The service does this by itself. Exits with 3 when a run came first; call it again.
    """
    from quantwatch.store import retention

    session = Session.of(context, json=as_json)
    limits = _limits(session)
    with session.writer() as database:
        plan = retention.plan if dry_run else retention.prune
        report = plan(database, limits)
    show_json(_document(report)) if as_json else _tell(report, dry_run)
    if not report.finished:
        raise StoreError(f"Not everything went: {report.waiting}; call it again afterwards.")


def sizes(context: typer.Context, as_json: AsJson = False) -> None:
    """Say how large the database is, by tier and table, and when its disk is full."""
    from quantwatch.store.sizes import read_sizes

    session = Session.of(context, json=as_json)
    limits = _limits(session)
    with session.reader() as database:
        found = read_sizes(database, limits)
    if as_json:
        show_json(_sizes_document(found))
        return
    for title, each in (("tier", found.tiers), ("table", found.tables)):
        rows = [[size.name, words(size.num_bytes), str(size.num_rows)] for size in each]
        show(table([title, "size", "rows"], rows))
    say(f"{forecast(found)}\n")


def words(num_bytes: float) -> str:
    """Return a number of bytes for people."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def forecast(found: "Sizes") -> str:
    """Return the sentence on growth and on the disk."""
    whole = f"{words(found.total_bytes)} in all, {words(found.reusable_bytes)} of it free inside"
    if not found.flows:
        return f"{whole}; too young for a forecast"
    grows = f"{whole}; grows by {words(found.bytes_per_day)} a day"
    if found.free_disk_bytes is None:
        return f"{grows}; how much room its server has is not known here"
    left = f"{words(found.free_disk_bytes)} of the disk are free"
    days = found.full_in_days
    ends = "never full at this rate" if days is None else f"full in {days:.0f} days"
    return f"{grows}; {left}: {ends}"


def _limits(session: Session) -> "RetentionConfig":
    """Return the `retention` section in use; the defaults without a configuration."""
    from quantwatch.config.service import RetentionConfig

    return RetentionConfig() if session.find_config() is None else session.config()[0].retention


def _tell(report: "Report", dry_run: bool) -> None:
    rows = [[tier, str(count)] for tier, count in report.deleted.items()]
    if rows:
        show(table(["would go" if dry_run else "gone", "rows"], rows))
    matrices = f"{words(report.payload_bytes)} of matrices"
    end = "" if dry_run else f"; the disk got {words(report.freed_bytes)} back"
    say(f"{sum(report.deleted.values())} rows, {matrices}{end}\n")
    if dry_run and report.waiting is not None:
        whisper(f"note: nothing would go now, {report.waiting}")


def _document(report: "Report") -> dict[str, Any]:
    return {
        "deleted": dict(report.deleted),
        "payload_bytes": report.payload_bytes,
        "freed_bytes": report.freed_bytes,
        "finished": report.finished,
        "waiting": report.waiting,
    }


def _sizes_document(found: "Sizes") -> dict[str, Any]:
    parts = {
        key: [{"name": s.name, "bytes": s.num_bytes, "rows": s.num_rows} for s in each]
        for key, each in (("tiers", found.tiers), ("tables", found.tables))
    }
    return {
        **parts,
        "total_bytes": found.total_bytes,
        "reusable_bytes": found.reusable_bytes,
        "free_disk_bytes": found.free_disk_bytes,
        "bytes_per_day": found.bytes_per_day if found.flows else None,
        "full_in_days": found.full_in_days if found.flows else None,
    }
