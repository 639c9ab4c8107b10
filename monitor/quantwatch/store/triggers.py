"""Runs that somebody asks for: pressing twice with one idempotency key starts one run.

A key belongs to whoever used it, so that nobody can find out about others' runs with it, and is
forgotten after a day.
"""

import hashlib
from dataclasses import dataclass, replace
from datetime import timedelta

from sqlalchemy import ColumnElement, Row, Select, delete, select
from sqlalchemy.orm import Session

from quantwatch.errors import StoreError, UserError
from quantwatch.store import audit, clock, lookups
from quantwatch.store.quarantine import quarantined_since
from quantwatch.store.queue import NewRun, enqueue
from quantwatch.store.session import Database
from quantwatch.store.tables import RunRow, TriggerRow
from quantwatch.store.types import json_sha
from quantwatch.telemetry import new_run_id

KEPT = timedelta(hours=24)
SHORTEST, LONGEST = 8, 255


@dataclass(frozen=True, slots=True)
class Triggered:
    """The run that a request led to. `is_new` is False when the key had been used for it before."""

    run_id: str
    is_new: bool


def trigger(db: Database, wanted: NewRun, *, actor: str, key: str | None = None) -> Triggered:
    """Queue a run on request, audited, also while its schedule is paused; `slot_key` is set here.

    Raises UserError when the key is malformed or was used for another request, or the check is in
    quarantine.
    """
    if key is not None:
        check_key(key)
    with db.writer() as session:
        if (since := quarantined_since(session, wanted.check)) is not None:
            raise UserError(
                f"Check {wanted.check!r} has been in quarantine since {since:%Y-%m-%d %H:%M} UTC: "
                "it killed its worker again and again. Mend it, then: quantwatch check release "
                f"{wanted.check}"
            )
        wanted = replace(wanted, actor=actor)
        if key is None:
            run_id = enqueue(session, replace(wanted, slot_key=f"m:{new_run_id()}"))
            if run_id is None:
                raise StoreError(f"Database {db.name}: a slot that is never used twice is taken.")
            _write_down(session, wanted, run_id)
            return Triggered(run_id, is_new=True)
        return _once(session, wanted, actor, key)


def check_key(key: str) -> None:
    """Raise UserError unless a key is 8 to 255 printable ASCII characters."""
    if not SHORTEST <= len(key) <= LONGEST or not all(" " <= char <= "~" for char in key):
        raise UserError(
            f"idempotency key {key[:40]!a}: allowed are {SHORTEST} to {LONGEST} printable "
            f"ASCII characters; it has {len(key)}"
        )


def _once(session: Session, wanted: NewRun, actor: str, key: str) -> Triggered:
    use = _Use(actor, _sha(f"{actor}\0{key}"), _request_sha(wanted))
    expired = (TriggerRow.expires_at <= clock.now(session), *use.mine)
    session.execute(delete(TriggerRow).where(*expired))
    known = _known(session, use)
    if known is None:
        run_id = _start(session, wanted, use)
        if run_id is not None:
            _write_down(session, wanted, run_id)
            return Triggered(run_id, is_new=True)
        # Somebody pressed at the same moment and has committed by now.
        known = session.execute(_uses(use)).one()
    if known.request_sha != use.request_sha:
        raise UserError(
            f"idempotency key {key!r} was used for another request (run {known.run_id}); a new "
            "request needs a new key"
        )
    return Triggered(known.run_id, is_new=False)


def _write_down(session: Session, wanted: NewRun, run_id: str) -> None:
    actor = wanted.actor or "unknown"
    audit.note(session, actor, "requested", f"run {run_id}", after={"check": wanted.check})


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of a key: whose, and for what."""

    actor: str
    key_sha: str
    request_sha: str

    @property
    def mine(self) -> tuple[ColumnElement[bool], ...]:
        return TriggerRow.actor == self.actor, TriggerRow.key_sha == self.key_sha


def _start(session: Session, wanted: NewRun, use: _Use) -> str | None:
    """Queue the run and keep its key; None when somebody else did it first."""
    run_id = enqueue(session, replace(wanted, slot_key=f"m:{use.key_sha}"))
    if run_id is None:
        if _known(session, use) is not None:
            return None
        # The run of a key that is forgotten by now has that slot for ever.
        run_id = enqueue(session, replace(wanted, slot_key=f"m:{use.key_sha}:{new_run_id()}"))
    expires = clock.now(session) + KEPT
    row = {"actor": use.actor, "key_sha": use.key_sha, "request_sha": use.request_sha}
    kept = lookups.insert_new(session, TriggerRow).values(**row, run_id=run_id, expires_at=expires)
    if session.execute(kept.returning(TriggerRow.run_id)).first() is not None:
        return run_id
    session.execute(delete(RunRow).where(RunRow.id == run_id))
    return None


def _known(session: Session, use: _Use) -> Row[str, str] | None:
    return session.execute(_uses(use)).first()


def _uses(use: _Use) -> Select[str, str]:
    return select(TriggerRow.run_id, TriggerRow.request_sha).where(*use.mine)


def _request_sha(wanted: NewRun) -> str:
    """Return the digest of what a request asks for, whoever asks and under whichever key."""
    own = ("slot_key", "actor", "not_before")
    return json_sha({n: getattr(wanted, n) for n in NewRun.__slots__ if n not in own})


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
