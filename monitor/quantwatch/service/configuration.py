"""The configuration in use: validated, planned, applied in one transaction, watched for changes."""

import hashlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantwatch.config.apply import (
    Applied,
    Change,
    Document,
    documents,
    mark,
    plan,
    settings_documents,
)
from quantwatch.config.endpoints import ADDRESS, Endpoint, endpoint_document, resolve_endpoints
from quantwatch.config.load import load_config, validate_files
from quantwatch.config.roots import require_inside
from quantwatch.config.schema import Config
from quantwatch.delivery import notices
from quantwatch.errors import ConfigError
from quantwatch.observability import labels, logs
from quantwatch.service.ping import dead_man_of
from quantwatch.store import applied as store
from quantwatch.store import audit, schedules
from quantwatch.store.session import Database

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration that is valid, with its secrets read and its paths inside the roots."""

    config: Config
    path: Path
    digest: str
    """Of the file's content when it was read."""
    endpoints: Mapping[str, Endpoint]
    dead_man: Endpoint | None = None
    """Who is called after each run."""

    @property
    def folder(self) -> Path:
        """Where relative paths start."""
        return self.path.resolve().parent

    @property
    def endpoint_shas(self) -> dict[str, str]:
        """Digest of each endpoint's settings."""
        return {name: endpoint.settings_sha for name, endpoint in self.endpoints.items()}

    @property
    def endpoint_documents(self) -> dict[str, dict[str, Any]]:
        """Each endpoint as it is kept and shown, without secrets."""
        known = self.config.endpoints
        return {name: endpoint_document(known[name], one) for name, one in self.endpoints.items()}


def load(path: Path, env: Mapping[str, str] = os.environ) -> Loaded:
    """Read and validate a file as the service uses it.

    Raises ConfigError on mistakes, missing files, paths outside the allowed roots and secrets that
    can't be read.
    """
    # Before it is read: a change in between is then seen as one.
    digest = digest_of(path)
    config = load_config(path)
    folder = path.resolve().parent
    # First: recipe files are read to be validated.
    require_inside(config, folder, str(path))
    validate_files(config, folder, str(path))
    endpoints = resolve_endpoints(config, folder, env)
    return Loaded(config, path, digest, endpoints, dead_man_of(config, env))


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, or why it can't be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"


def plan_changes(db: Database, loaded: Loaded) -> tuple[Change, ...]:
    """Return what applying it would change; nothing is written."""
    with db.reader() as session:
        applied = _applied(session)
    return _plan(loaded, applied)


def apply(db: Database, loaded: Loaded, actor: str) -> tuple[Change, ...]:
    """Make it what the service works with: checks, schedules, endpoints in one transaction.

    Return what changed; each change is audited under `actor`.
    """
    wanted = _wanted(loaded)
    kept = {f"{store.ENDPOINT}{name}": one for name, one in loaded.endpoint_documents.items()}
    with db.writer() as session:
        store.keep_others_out(session)
        applied = _applied(session)
        changes = _plan(loaded, applied)
        store.apply_checks(session, wanted.checks, str(loaded.folder))
        schedules.apply(session, loaded.config.checks)
        store.apply_endpoints(session, loaded.endpoint_shas)
        notices.end_removed(session, loaded.endpoints)
        store.apply_settings(session, {**wanted.settings, **kept})
        for change in changes:
            before, after = (_document(each, change) for each in (applied, wanted))
            subject = f"{change.kind}:{change.name}"
            audit.note(session, actor, f"config.{change.action}", subject, before, after)
    tell(changes, loaded)
    return changes


def _applied(session: "Session") -> Applied:
    checks, settings = store.applied_checks(session), store.applied_settings(session)
    return Applied(
        checks={name: check.config for name, check in checks.items()},
        endpoints=store.applied_endpoints(session),
        settings={name: one.document for name, one in settings.items()},
        folders={name: check.folder for name, check in checks.items()},
    )


def _wanted(loaded: Loaded) -> Applied:
    settings = settings_documents(loaded.config)
    return Applied(documents(loaded.config), loaded.endpoint_documents, settings)


def _plan(loaded: Loaded, applied: Applied) -> tuple[Change, ...]:
    return plan(loaded.config, loaded.endpoint_documents, applied, str(loaded.folder))


def _document(all_: Applied, change: Change) -> Document | None:
    """Return what a change is about, as the audit keeps it: no digest of secrets."""
    kinds = {"endpoint": all_.endpoints, "settings": all_.settings}
    found = kinds.get(change.kind, all_.checks).get(change.name)
    return None if found is None else {k: v for k, v in found.items() if k != ADDRESS}


def tell(changes: tuple[Change, ...], loaded: Loaded) -> None:
    """Log what changed, and every check whose model may run its own code."""
    for change in changes:
        log.info(
            f"configuration: {change.action} {change.kind}",
            name=change.name,
            details="; ".join(change.details) or None,
        )
    for name, check in loaded.config.checks.items():
        if words := mark(check):
            log.warning("a check may run code of its own", check=name, variants=words)


def declare_labels(config: Config) -> None:
    """Let the names of this configuration, and only those, be labels of meters."""
    candidates = {one.name for check in config.checks.values() for one in check.candidates}
    formats = {endpoint.format for endpoint in config.endpoints.values()}
    labels.declare("check", config.checks)
    labels.declare("variant", {*candidates, "reference"})
    labels.declare("channel", {*config.endpoints, *formats})


class Current:
    """The configuration in use, for all parts of a process."""

    def __init__(self, loaded: Loaded) -> None:
        self._lock = threading.Lock()
        self._loaded = loaded

    @property
    def loaded(self) -> Loaded:
        """The configuration in use now."""
        with self._lock:
            return self._loaded

    def replace(self, loaded: Loaded) -> None:
        """Use another one from now on."""
        with self._lock:
            self._loaded = loaded
        declare_labels(loaded.config)


class FileWatch:
    """Notices that a file has other content than the one in use, once it holds still."""

    def __init__(self, path: Path, handled: str) -> None:
        self._path = path
        self._handled = self._before = handled

    def changed(self) -> bool:
        """Say whether there is new content, the same as at the last look: nobody is writing it."""
        digest = digest_of(self._path)
        settled = digest == self._before
        self._before = digest
        return settled and digest != self._handled

    def handled(self) -> None:
        """Take the content of the last look as dealt with, whether it could be used or not."""
        self._handled = self._before


def reload(db: Database, current: Current, *, writes: bool) -> str | None:
    """Take over the file again; a broken one keeps the configuration before it.

    `writes` is False in a process that doesn't schedule: it uses the file, another applies it.
    Return what is wrong with the file, None when it is in use now.
    """
    path = current.loaded.path
    try:
        loaded = load(path)
    except ConfigError as error:
        log.error(
            "the configuration can't be used; the one before stays", path=str(path), why=str(error)
        )
        return str(error)
    if writes:
        apply(db, loaded, f"file:{path}")
    if loaded.config.service != current.loaded.config.service:
        log.warning("changes of [service] take effect at the next start", path=str(path))
    current.replace(loaded)
    log.info("configuration in use", path=str(path), checks=len(loaded.config.checks))
    return None
