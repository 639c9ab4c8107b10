"""One operator in depth: what fails, errors by shape and dtype, trend, speed, environment."""

from collections.abc import Sequence

import streamlit as st

from quantwatch.store.kernel_groups import FAILED
from quantwatch_dashboard import clock, text
from quantwatch_dashboard.charts.kernels import share_trend, speed_by_shape
from quantwatch_dashboard.components import facts, kernel_batches, kernels, page, picture
from quantwatch_dashboard.components.address import pick
from quantwatch_dashboard.logic import kernel_matrix
from quantwatch_dashboard.logic.kernel_matrix import Cell
from quantwatch_dashboard.queries import connection
from quantwatch_dashboard.queries import kernels as kernel_queries


def show(url: str, cells: Sequence[Cell], device: str) -> None:
    """Show what fails among these cells, then the chosen or the worst one."""
    _failures(url, cells, device)
    tested = [cell for cell in cells if cell.group is not None]
    if not tested:
        return
    cell = _chosen(tested)
    assert cell.batch is not None, "a tested cell has a batch"
    found = kernel_queries.cases(url, cell.batch.id, cell.operator, cell.backend)
    total = len(found) if cell.group is None else cell.group.num_cases
    said = "The largest error of all layouts as a share of the tolerance; stronger is closer to it."
    if len(found) < total:
        said += f" Of the first {len(found):,} of {total:,} cases."
    page.section(f"{cell.operator} on {cell.backend}, by shape and dtype", said)
    _chosen_facts(cell)
    st.html(kernels.by_shape(kernel_matrix.places(found)))
    _pictures(url, cell, [c for c in cells if c.operator == cell.operator], device)
    before = [
        batch
        for batch in kernel_queries.batches(url, "test")
        if batch.device == device and batch.started_at < cell.batch.started_at
    ]
    if before:
        st.html(kernel_batches.changed(before[0], cell.batch))
    with st.expander("Environment of this batch"):
        st.html(facts.flat(cell.batch.environment))


def _failures(url: str, cells: Sequence[Cell], device: str) -> None:
    failing = [cell for cell in cells if cell.status == FAILED and cell.batch is not None]
    if not failing:
        return
    found = kernel_queries.failures(url, failing)
    total = sum(cell.group.num_failed for cell in failing if cell.group is not None)
    words = "" if len(found) >= total else f" The first {len(found):,} of {total:,} are shown."
    page.section("What fails", f"Each row can be repeated by its command.{words}")
    st.html(kernels.failures(found, connection.program(), device))


def _chosen(tested: Sequence[Cell]) -> Cell:
    """Let the reader choose a back end of the operator in the address, else the worst cell."""
    worst = min(tested, key=lambda cell: cell.badness)
    named = st.query_params.get("op")
    own = [cell for cell in tested if cell.operator == named] or [
        cell for cell in tested if cell.operator == worst.operator
    ]
    first = min(own, key=lambda cell: cell.badness)
    with st.columns([1, 3])[0]:
        chosen = pick("Back end", "backend", [cell.backend for cell in own], first.backend)
    return next(cell for cell in own if cell.backend == chosen)


def _chosen_facts(cell: Cell) -> None:
    group, batch = cell.group, cell.batch
    assert group is not None, "a tested cell has a group"
    assert batch is not None, "and a batch"
    pairs: list[tuple[str, object]] = [
        ("tested", text.minute(batch.started_at, clock.zone())),
        ("passed", f"{group.num_passed:,} of {group.num_cases:,}"),
        ("fallbacks", f"{cell.remarks.num_fallbacks:,}"),
    ]
    pairs += [("does not apply" if not group.num_failed else "reason", f"{why} ({count:,} cases)")
              for why, count in cell.remarks.reasons[:6]]  # fmt: skip
    st.html(facts.facts(pairs))


def _pictures(url: str, cell: Cell, own: Sequence[Cell], device: str) -> None:
    times = [
        batch.started_at.astimezone(clock.zone())
        for batch in reversed(kernel_queries.batches(url, "test"))
        if batch.device == device
    ][: len(cell.trend)]
    lines = [(each.backend, each.trend) for each in own if any(v is not None for v in each.trend)]
    if len(times) > 1 and lines:
        page.section("Error over batches", "A change of code or library shows as a step.")
        picture.show(
            share_trend(times, lines), "kernel-trend",
            f"{cell.operator}: error over batches", f"{cell.operator}-errors",
        )  # fmt: skip
    timed = dict.fromkeys(each.speed.batch.id for each in own if each.speed is not None)
    speeds = [s for batch in timed for s in kernel_queries.speeds(url, batch)]
    mine = [speed for speed in speeds if speed.operator == cell.operator]
    if mine:
        page.section(
            "Speed by shape",
            "Interleaved with bfloat16 F.linear; medians of the rounds, bars are 95 % intervals.",
        )
        picture.show(
            speed_by_shape(mine), "kernel-speed",
            f"{cell.operator}: speed by shape", f"{cell.operator}-speed",
        )  # fmt: skip
        for said in dict.fromkeys(f"{s.backend}: {s.message}" for s in mine if s.message):
            page.note(said)
