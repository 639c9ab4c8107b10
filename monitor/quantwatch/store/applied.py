"""Checks and endpoints as the service applied them last.

What vanished from the file is marked as removed, never deleted: its history stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, insert, or_, select, text, update
from sqlalchemy.orm import Session

from quantwatch.domain import Json
from quantwatch.store import clock, lookups
from quantwatch.store.endpoints import sync_endpoints
from quantwatch.store.tables import AppliedSettingsRow, CheckRow, EndpointRow
from quantwatch.store.types import json_sha

_APPLY_LOCK = 0x6170706C79  # "apply": any number, the same in every process
_IN_USE = (CheckRow.config_sha.is_not(None), CheckRow.removed_at.is_(None))
ENDPOINT = "endpoint:"
REMOVED = "removed"
"""State of an endpoint that the configuration no longer has."""


@dataclass(frozen=True, slots=True)
class AppliedCheck:
    """A check as it was applied last. Relative paths in it start at `folder`."""

    check: str
    config: Json
    folder: str
    applied_at: datetime | None


@dataclass(frozen=True, slots=True)
class Section:
    """What was applied besides checks, without secrets."""

    document: Json
    applied_at: datetime


def applied_checks(session: Session) -> dict[str, AppliedCheck]:
    """Return the checks that the service works with, by name."""
    columns = select(CheckRow.name, CheckRow.config, CheckRow.base_dir, CheckRow.applied_at)
    rows = session.execute(columns.where(*_IN_USE).order_by(CheckRow.name))
    return {
        row.name: AppliedCheck(row.name, row.config or {}, row.base_dir or "", row.applied_at)
        for row in rows
    }


def keep_others_out(session: Session) -> None:
    """Let one process apply a configuration at a time, to the end of this transaction."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _APPLY_LOCK})


def apply_checks(session: Session, checks: Mapping[str, Json], base_dir: str) -> None:
    """Make these the checks that the service works with, in the caller's transaction.

    One that comes back goes on with its history. Being paused or quarantined is somebody's
    decision, which a file does not undo.
    """
    moment = clock.now(session)
    for name in sorted(checks):
        _apply_check(session, name, checks[name], base_dir, moment)
    session.execute(
        update(CheckRow)
        .where(*_IN_USE, CheckRow.name.not_in(list(checks)))
        .values(removed_at=moment)
        .execution_options(synchronize_session=False)
    )


def applied_endpoints(session: Session) -> dict[str, Json | None]:
    """Return the endpoints that the service works with by name, as they were applied last.

    None: it is in use, but nobody has applied a configuration with it yet (a test message).
    """
    names = session.scalars(select(EndpointRow.name).where(EndpointRow.state != REMOVED))
    known = applied_settings(session)
    found = {name: known.get(f"{ENDPOINT}{name}") for name in sorted(names)}
    return {name: None if each is None else each.document for name, each in found.items()}


def applied_settings(session: Session) -> dict[str, Section]:
    """Return all that was applied besides checks, by name: sections, and `endpoint:NAME`."""
    rows = session.scalars(select(AppliedSettingsRow).order_by(AppliedSettingsRow.name))
    return {row.name: Section(row.document, row.applied_at) for row in rows}


def apply_endpoints(session: Session, settings: Mapping[str, str]) -> None:
    """Make these the endpoints that the service works with; one that comes back is enabled."""
    sync_endpoints(session, settings)
    gone = EndpointRow.name.not_in(list(settings))
    session.execute(
        update(EndpointRow)
        .where(gone, EndpointRow.state != REMOVED)
        # No digest: if it comes back, it is another one, which `sync_endpoints` enables.
        .values(state=REMOVED, reason="no longer in the configuration", settings_sha="")
        .execution_options(synchronize_session=False)
    )


def removed_endpoints(session: Session) -> list[str]:
    """Return the endpoints that the configuration no longer has, by name."""
    removed = select(EndpointRow.name).where(EndpointRow.state == REMOVED)
    return list(session.scalars(removed.order_by(EndpointRow.name)))


def apply_settings(session: Session, settings: Mapping[str, Json]) -> None:
    """Keep what was applied besides checks, in the transaction that keeps others out."""
    moment = clock.now(session)
    known = {name: section.document for name, section in applied_settings(session).items()}
    new = {name: document for name, document in settings.items() if known.get(name) != document}
    stale = AppliedSettingsRow.name.not_in(list(settings)) | AppliedSettingsRow.name.in_(list(new))
    session.execute(delete(AppliedSettingsRow).where(stale))
    rows = [
        {"name": name, "document": dict(document), "applied_at": moment}
        for name, document in sorted(new.items())
    ]
    if rows:
        session.execute(insert(AppliedSettingsRow), rows)


def _apply_check(
    session: Session, name: str, document: Json, base_dir: str, moment: datetime
) -> None:
    """Write a check unless it is there as it is: `applied_at` says when it became so."""
    check_id = lookups.check_id(session, name)
    sha = json_sha(document)
    same = (CheckRow.config_sha == sha) & (CheckRow.base_dir == base_dir)
    session.execute(
        update(CheckRow)
        .where(CheckRow.id == check_id)
        .where(or_(CheckRow.config_sha.is_(None), CheckRow.removed_at.is_not(None), ~same))
        .values(
            config=dict(document),
            config_sha=sha,
            base_dir=base_dir,
            applied_at=moment,
            removed_at=None,
        )
        .execution_options(synchronize_session=False)
    )
