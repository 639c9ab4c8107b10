"""Kernels: batches of cases and speeds, and which checks ask for an operator."""

from collections.abc import Sequence

import streamlit as st

from quantwatch.store import kernel_groups, marks
from quantwatch.store import kernels as store
from quantwatch.store.kernel_groups import FAILED, KernelGroup, Remarks
from quantwatch.store.kernels import KEPT, KernelBatch, KernelCase, KernelSpeed, Kind
from quantwatch_dashboard.logic.kernel_matrix import Cell, Key, matrix, remarked
from quantwatch_dashboard.logic.kernel_uses import Uses, uses
from quantwatch_dashboard.queries.connection import SHORT_S, database
from quantwatch_dashboard.queries.overview import checks

WRITTEN_S = 3600
"""How long a batch is kept: it never changes. Of the newest ones all are kept at once."""
MOST_CASES, MOST_FAILURES = 4_000, 200
_LEAST_FAILURES = 5
"""Of each operator and back end: of none only what another one's failures leave."""


@st.cache_resource(ttl=SHORT_S, max_entries=8, show_spinner=False)
def batches(url: str, kind: Kind) -> tuple[KernelBatch, ...]:
    """Return the batches of a kind that are kept, newest first."""
    return tuple(store.list_batches(database(url), kind, limit=KEPT))


@st.cache_resource(ttl=WRITTEN_S, max_entries=4 * KEPT, show_spinner=False)
def groups(url: str, batch_id: str) -> tuple[KernelGroup, ...]:
    """Return how each operator of a batch did on each back end."""
    return kernel_groups.groups_of(database(url), batch_id)


@st.cache_resource(ttl=WRITTEN_S, max_entries=KEPT, show_spinner=False)
def remarks(url: str, batch_id: str) -> dict[Key, Remarks]:
    """Return fallbacks and messages of a batch; only of those that are shown."""
    return kernel_groups.remarks_of(database(url), batch_id)


@st.cache_resource(ttl=WRITTEN_S, max_entries=4 * KEPT, show_spinner=False)
def speeds(url: str, batch_id: str) -> tuple[KernelSpeed, ...]:
    """Return a batch's speeds."""
    return tuple(store.speeds_of(database(url), batch_id))


@st.cache_resource(ttl=WRITTEN_S, max_entries=32, show_spinner=False)
def cases(url: str, batch_id: str, operator: str, backend: str) -> tuple[KernelCase, ...]:
    """Return the cases of one operator on one back end."""
    return kernel_groups.cases_where(
        database(url), batch_id, MOST_CASES, operator=operator, backend=backend
    )


def failures(url: str, cells: Sequence[Cell]) -> tuple[KernelCase, ...]:
    """Return the first cases that failed of each of these cells: about 200 in all."""
    most = max(_LEAST_FAILURES, MOST_FAILURES // max(1, len(cells)))
    places = [(c.batch.id, c.operator, c.backend) for c in cells if c.batch is not None]
    return tuple(case for place in places for case in _failures(url, place, most))


@st.cache_resource(ttl=WRITTEN_S, max_entries=256, show_spinner=False)
def _failures(url: str, place: tuple[str, str, str], most: int) -> tuple[KernelCase, ...]:
    batch_id, operator, backend = place
    return kernel_groups.cases_where(
        database(url), batch_id, most, operator=operator, backend=backend, status=FAILED
    )


@st.cache_resource(ttl=SHORT_S, max_entries=16, show_spinner=False)
def cells(url: str, device: str, upto: str | None) -> tuple[Cell, ...]:
    """Return each operator on each back end of a device, as of a batch or (None) as of now."""
    tests = [batch for batch in batches(url, "test") if batch.device == device]
    timed = [batch for batch in batches(url, "bench") if batch.device == device]
    if upto is not None:
        until = next((b.finished_at for b in (*tests, *timed) if b.id == upto), None)
        tests, timed = (
            [b for b in each if until is None or b.finished_at <= until] for each in (tests, timed)
        )
    found = matrix(
        [(batch, groups(url, batch.id)) for batch in tests],
        [(batch, speeds(url, batch.id)) for batch in timed],
    )
    shown = {cell.batch.id for cell in found if cell.batch is not None}
    return remarked(found, {batch_id: remarks(url, batch_id) for batch_id in shown})


@st.cache_resource(ttl=SHORT_S, max_entries=16, show_spinner=False)
def users(url: str, operators: tuple[str, ...]) -> dict[str, Uses]:
    """Return which checks in use ask for each operator."""
    known = checks(url)
    # Without a service nothing is applied: then a check is what was run from the command line.
    shown = [check for check in known if check.state.in_use] or known
    newest = [check.decided.run_id for check in shown if check.decided is not None]
    with database(url).reader() as session:
        notes = marks.candidate_notes(session, newest)
    return uses(operators, {check.check: check.state.config for check in shown}, notes)
