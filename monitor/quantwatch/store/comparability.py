"""What keeps runs from being compared, by their rows alone: no run is read for it."""

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from quantwatch.store.tables import RunRow

Measured = Mapping[str, Any]
"""What two comparable runs have in common, by its name in words."""


def measured_by(session: Session, run_ids: Collection[str]) -> dict[str, Measured]:
    """Return what runs measured, and how: suite, reference, positions, definitions."""
    columns = (
        RunRow.suite_id.label("suite"),
        RunRow.num_prompts.label("number of prompts"),
        # A variant is kept once per fingerprint: another id is another reference.
        RunRow.reference_variant_id.label("reference"),
        RunRow.capture_sha.label("capture settings"),
        RunRow.metrics_version.label("metrics version"),
    )
    query = select(RunRow.id, *columns).where(RunRow.id.in_(sorted(run_ids)))
    found: dict[str, Measured] = {}
    for row in session.execute(query).mappings():
        found[row["id"]] = {name: value for name, value in row.items() if name != "id"}
    return found


def differences(now: Measured | None, before: Measured | None) -> tuple[str, ...]:
    """Return what keeps two runs from being compared; () if nothing does, or one is unknown.

    The same parts as in `baselines.comparable`, which names the digests of two whole runs.
    """
    if now is None or before is None:
        return ()
    return tuple(name for name, value in now.items() if value != before[name])
