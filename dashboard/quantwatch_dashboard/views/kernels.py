"""Kernels: the operators under test, each against its float64 twin and against F.linear."""

from collections.abc import Sequence

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from quantwatch.store.kernel_groups import FAILED, NOT_APPLICABLE, PASSED
from quantwatch.store.kernels import KernelBatch
from quantwatch_dashboard import clock, text
from quantwatch_dashboard.components import kernel_batches, kernel_words, kernels, page, trouble
from quantwatch_dashboard.components.address import choose, every, pick
from quantwatch_dashboard.logic import kernel_matrix
from quantwatch_dashboard.logic.kernel_matrix import Cell
from quantwatch_dashboard.queries import connection
from quantwatch_dashboard.queries import kernels as kernel_queries
from quantwatch_dashboard.text import ANY
from quantwatch_dashboard.views import kernels_inside

_NOW = "*"
_STATUSES = (ANY, FAILED, PASSED, NOT_APPLICABLE)
Columns = Sequence[DeltaGenerator]


@trouble.guarded
def show() -> None:
    """Show every operator on every back end, then what fails, then one of them in depth."""
    page.begin()
    url = connection.url()
    tests = kernel_queries.batches(url, "test")
    every = sorted(
        (*tests, *kernel_queries.batches(url, "bench")), key=lambda b: b.started_at, reverse=True
    )
    if not every:
        page.head("Kernels")
        st.html(kernel_words.empty(connection.program()))
        return
    title, columns = st.container(), st.columns([2, 3, 3, 2])
    device, upto = _where(every, columns)
    cells = kernel_queries.cells(url, device, upto)
    with title:
        page.head(kernel_words.headline(cells), kernel_words.beside(cells, device, clock.now()))
    shown = _filtered(cells, columns)
    st.html(kernel_words.tiles(shown or cells))
    _matrix(url, cells, shown, {"device": device} | ({} if upto is None else {"batch": upto}))
    kernels_inside.show(url, shown, device)
    _batches(every)


def _where(every: Sequence[KernelBatch], columns: Columns) -> tuple[str, str | None]:
    """Let the reader choose a device, and as of which batch."""
    devices = list(dict.fromkeys(batch.device for batch in every))
    with columns[0]:
        device = pick("Device", "device", devices, devices[0])
    own = {batch.id: batch for batch in every if batch.device == device}
    with columns[1]:
        chosen = pick("As of", "batch", [_NOW, *own], _NOW, lambda name: _batch_name(own, name))
    return device, None if chosen == _NOW else chosen


def _batch_name(own: dict[str, KernelBatch], name: str) -> str:
    batch = own.get(name)
    if batch is None:
        return "the newest batch of each operator"
    what = f"{batch.num_failed} failed" if batch.kind == "test" else "speeds"
    return text.run_line(text.minute(batch.started_at, clock.zone()), what, batch.id)


def _filtered(cells: Sequence[Cell], columns: Columns) -> tuple[Cell, ...]:
    operators, _ = kernel_matrix.names(cells)
    with columns[2]:
        operator = choose("Operator", "op", [ANY, *operators], every("operators"), "stretch")
    with columns[3]:
        status = choose("Status", "status", _STATUSES, every("statuses"), "stretch")
    return tuple(
        cell for cell in cells
        if operator in (ANY, cell.operator) and status in (ANY, cell.status)
    )  # fmt: skip


def _matrix(
    url: str, cells: Sequence[Cell], shown: Sequence[Cell], address: dict[str, str]
) -> None:
    page.section("Operators and back ends", kernel_words.READING)
    if not shown:
        st.html(trouble.state("Nothing matches", "No operator has this status on this device."))
        return
    operators, _ = kernel_matrix.names(cells)
    st.html(
        kernels.matrix(
            {cell.key: cell for cell in shown},
            kernel_matrix.names(shown),
            kernel_queries.users(url, operators),
            address,
        )
    )


def _batches(every: Sequence[KernelBatch]) -> None:
    page.section(
        "Batches",
        "Each call of quantwatch kernels test or bench. A name shows the page as of that batch.",
    )
    st.html(kernel_batches.table_of(every, clock.now(), clock.zone()))
