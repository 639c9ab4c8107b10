"""Rows that are written once and found again by their key: names, digests, suites."""

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from quantwatch.domain import Json, Scope, Variant, layer_index
from quantwatch.store.tables import (
    Base,
    CheckRow,
    EnvironmentRow,
    MetricRow,
    ScopeListRow,
    ScopeRow,
    VariantRow,
)
from quantwatch.store.types import json_sha


def insert_new(session: Session, table: type[Base]) -> Insert:
    """Return an INSERT that leaves alone a row that another writer has just written."""
    if session.get_bind().dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    return sqlite.insert(table).on_conflict_do_nothing()


def ids_by_key(
    session: Session, table: type[Base], key: str, rows: Iterable[Mapping[str, Any]]
) -> dict[str, int]:
    """Insert the rows whose key is new and return every row's id by its key."""
    wanted = {row[key]: row for row in rows}
    known = _ids(session, table, key, wanted)
    # Sorted: two writers that insert the same rows in another order would wait for each other.
    new = [wanted[name] for name in sorted(wanted.keys() - known.keys())]
    if not new:
        return known
    session.execute(insert_new(session, table), [dict(row) for row in new])
    return known | _ids(session, table, key, [row[key] for row in new])


def check_id(session: Session, name: str) -> int:
    """Return a check's id; adds the check if it is new."""
    return ids_by_key(session, CheckRow, "name", [{"name": name}])[name]


def metric_ids(session: Session, slugs: Iterable[str]) -> dict[str, int]:
    """Return the ids of metrics by slug."""
    return ids_by_key(session, MetricRow, "slug", ({"slug": slug} for slug in slugs))


def scope_ids(session: Session, names: Iterable[str]) -> dict[str, int]:
    """Return the ids of scopes by name."""
    rows = ({"name": name, "layer_index": layer_index(name)} for name in names)
    return ids_by_key(session, ScopeRow, "name", rows)


def scope_list_ids(
    session: Session, lists: Iterable[tuple[Scope, ...]]
) -> dict[tuple[Scope, ...], int]:
    """Return the ids of lists of scopes."""
    shas = {names: json_sha(names) for names in set(lists)}
    rows = ({"sha": sha, "names": names} for names, sha in shas.items())
    ids = ids_by_key(session, ScopeListRow, "sha", rows)
    return {names: ids[sha] for names, sha in shas.items()}


def environment_id(session: Session, details: Json) -> int:
    """Return the id of an environment by its digest."""
    sha = json_sha(details)
    return ids_by_key(session, EnvironmentRow, "sha", [{"sha": sha, "details": details}])[sha]


def variant_ids(session: Session, variants: Iterable[Variant]) -> dict[str, int]:
    """Return the ids of variants by the digest of their fingerprint."""
    rows = ({"fingerprint": variant.fingerprint.digest, **digests(variant)} for variant in variants)
    return ids_by_key(session, VariantRow, "fingerprint", rows)


def digests(variant: Variant) -> dict[str, str]:
    """Return the six digests of a variant by name."""
    return {name: getattr(variant.fingerprint, name) for name in variant.fingerprint.__slots__}


def _ids(session: Session, table: type[Base], key: str, keys: Iterable[str]) -> dict[str, int]:
    columns = table.__table__.columns
    found = session.execute(select(columns[key], columns["id"]).where(columns[key].in_(list(keys))))
    return {row[0]: row[1] for row in found}
