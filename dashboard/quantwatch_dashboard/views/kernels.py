"""Kernels: the operators under test, each against its float64 twin and against F.linear."""

from collections.abc import Sequence

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from quantwatch.store.kernel_groups import FAILED, NOT_APPLICABLE, PASSED
from quantwatch.store.kernels import KernelBatch
from quantwatch_dashboard import clock, kernel_matrix, queries
from quantwatch_dashboard.components import kernel_words, kernels, page, trouble
from quantwatch_dashboard.components.filters import ANY
from quantwatch_dashboard.components.picker import pick
from quantwatch_dashboard.kernel_matrix import Cell
from quantwatch_dashboard.queries import kernels as kernel_queries
from quantwatch_dashboard.views import kernels_inside

_NOW = "*"
_STATUSES = (ANY, FAILED, PASSED, NOT_APPLICABLE)
Columns = Sequence[DeltaGenerator]


@trouble.guarded
def show() -> None:
    """Show every operator on every back end, then what fails, then one of them in depth."""
    page.begin()
    url = queries.url()
    tests = kernel_queries.batches(url, "test")
    every = sorted(
        (*tests, *kernel_queries.batches(url, "bench")), key=lambda b: b.started_at, reverse=True
    )
    if not every:
        page.head("Kernels")
        st.html(kernel_words.empty(queries.program()))
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
    started = batch.started_at.astimezone(clock.zone())
    what = f"{batch.num_failed} failed" if batch.kind == "test" else "speeds"
    return f"{started:%Y-%m-%d %H:%M} · {what} · …{batch.id[-6:]}"


def _filtered(cells: Sequence[Cell], columns: Columns) -> tuple[Cell, ...]:
    operators, _ = kernel_matrix.names(cells)
    with columns[2]:
        operator = pick("Operator", "op", [ANY, *operators], ANY, _word)
    with columns[3]:
        status = pick("Status", "status", _STATUSES, ANY, _word)
    return tuple(
        cell for cell in cells
        if operator in (ANY, cell.operator) and status in (ANY, cell.status)
    )  # fmt: skip


def _word(name: str) -> str:
    return "all" if name == ANY else name


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
    st.html(kernels.batches(every, clock.now(), clock.zone()))
