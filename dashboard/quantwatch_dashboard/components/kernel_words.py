"""Kernels in words: the headline, the figures at the top, and what to do when there are none."""

from collections.abc import Sequence
from datetime import datetime
from statistics import median

from quantwatch.store.kernel_groups import FAILED
from quantwatch_dashboard import text
from quantwatch_dashboard.components import trouble
from quantwatch_dashboard.components.kernels import share_words
from quantwatch_dashboard.components.markup import Html
from quantwatch_dashboard.components.tiles import tile
from quantwatch_dashboard.components.tiles import tiles as row_of
from quantwatch_dashboard.logic.kernel_matrix import Cell
from quantwatch_dashboard.logic.service_words import Figure

READING = (
    "Each case compares one operator with its float64 twin. The bar is the largest error as a share"
    " of what is allowed: above 100 % it fails, and where a case allows a single rounding it is"
    " always close to that. Where a back end does not apply, another one answers and the fallback"
    " is counted. Speed is a multiple of bfloat16 F.linear, the median over shapes. Lines"
    " go over the batches, on log axes."
)


def empty(program: str) -> Html:
    """Return what the page shows before any kernel was tested."""
    return trouble.state(
        "No kernel has been tested yet",
        "Here stands how the quantize and serve kernels of this machine compare with their float64"
        " twins, and how fast they are. Nothing is in the database so far.",
        "The first command takes a minute or two on one core (without --quick: half an hour), the"
        " second one a few minutes. Both store what they find; then reload this page:",
        command=f"{program} kernels test --quick\n{program} kernels bench --quick",
    )


def headline(cells: Sequence[Cell]) -> str:
    """Say the worst."""
    failing = {cell.operator for cell in cells if cell.status == FAILED}
    if failing:
        return text.plural(len(failing), "operator fails", "operators fail")
    tested = [cell for cell in cells if cell.group is not None]
    return "All kernels pass" if tested else "Kernels were only timed"


def beside(cells: Sequence[Cell], device: str, now: datetime) -> str:
    """Say where and when, and on which commit."""
    known = [cell.batch for cell in cells if cell.batch is not None]
    if not known:
        return f"on {device}"
    newest = max(known, key=lambda batch: batch.started_at)
    commit = f", commit {newest.git_sha[:10]}" if newest.git_sha else ""
    return f"tested on {device} {text.age(newest.finished_at, now)}{commit}"


def tiles(cells: Sequence[Cell]) -> Html:
    """Return the figures over everything that was tested."""
    groups = [cell.group for cell in cells if cell.group is not None]
    passed, failed = sum(g.num_passed for g in groups), sum(g.num_failed for g in groups)
    absent = sum(g.num_not_applicable for g in groups)
    fallbacks = f"{sum(cell.remarks.num_fallbacks for cell in cells):,}"
    shown = (
        Figure("Cases that pass", f"{passed:,}", f"{failed:,} fail, {absent:,} do not apply",
               failed > 0),
        _tightest(cells),
        Figure("Fallbacks", fallbacks, "calls and rows that another back end did"),
        _speeds(cells),
    )  # fmt: skip
    return row_of(tile(f.name, f.value, f.detail, hot=f.bad) for f in shown)


def _tightest(cells: Sequence[Cell]) -> Figure:
    known = [
        cell for cell in cells if cell.group is not None and cell.group.worst_share is not None
    ]
    if not known:
        return Figure("Largest error", text.NONE, "nothing was compared")
    worst = max(known, key=lambda cell: (cell.group and cell.group.worst_share) or 0.0)
    value = worst.group.worst_share if worst.group is not None else None
    where = f"of its tolerance: {worst.operator}, {worst.backend}"
    return Figure("Largest error", share_words(value), where, (value or 0) > 1)


def _speeds(cells: Sequence[Cell]) -> Figure:
    timed = [cell for cell in cells if cell.speed is not None]
    if not timed:
        why = "not timed on this device: quantwatch kernels bench"
        return Figure("Speed, median", text.NONE, why)
    middle = median(cell.speed.middle for cell in timed if cell.speed is not None)
    best = max(timed, key=lambda cell: cell.speed.middle if cell.speed is not None else 0.0)
    fastest = best.speed.middle if best.speed is not None else 0.0
    words = f"F.linear; fastest {text.number(fastest)} ×: {best.operator}, {best.backend}"
    return Figure("Speed, median", f"{text.number(middle)} ×", words)
