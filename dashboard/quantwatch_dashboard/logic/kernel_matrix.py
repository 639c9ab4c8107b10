"""How every operator does on every back end, from batches. Pure: no clock, no database.

A batch may hold one operator only (`kernels test --op`), so each cell shows the newest batch in
which it is. Nothing here knows the name of an operator or of a back end.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from quantwatch.store.kernel_groups import FAILED, NOT_APPLICABLE, PASSED, KernelGroup, Remarks
from quantwatch.store.kernels import KernelBatch, KernelCase, KernelSpeed

UNTESTED = "not tested"
Key = tuple[str, str]
"""Operator and back end."""
_SILENT = Remarks()


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed as a multiple of bfloat16 F.linear's, over the shapes of one batch.

    `middle` is the median of the shapes, `slowest` and `fastest` are those with their intervals.
    """

    middle: float
    slowest: KernelSpeed
    fastest: KernelSpeed
    num_shapes: int
    batch: KernelBatch
    trend: tuple[float | None, ...]
    """The median of each batch, oldest first; None where it was not timed."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One operator on one back end. `group` and `batch` are None where it was only timed.

    `trend` is the largest error ÷ tolerance of each batch, oldest first.
    """

    operator: str
    backend: str
    group: KernelGroup | None
    batch: KernelBatch | None
    trend: tuple[float | None, ...]
    speed: Speed | None
    remarks: Remarks = _SILENT

    @property
    def status(self) -> str:
        """Return the worst of its cases: one that fails decides, one that passes beats none."""
        if self.group is None:
            return UNTESTED
        if self.group.num_failed:
            return FAILED
        return PASSED if self.group.num_passed else NOT_APPLICABLE

    @property
    def key(self) -> Key:
        """Operator and back end."""
        return self.operator, self.backend

    @property
    def badness(self) -> tuple[int, float]:
        """Sort key: failures first, then the least room below the tolerance."""
        share = self.group.worst_share if self.group is not None else None
        rank = [FAILED, PASSED, NOT_APPLICABLE, UNTESTED].index(self.status)
        return rank, -(share if share is not None else -1.0)


@dataclass(frozen=True, slots=True)
class Place:
    """All layouts of one variant, shape and dtype: what a drill-down shows as one field."""

    num_passed: int
    num_failed: int
    num_not_applicable: int
    worst_share: float | None
    message: str


def matrix(
    tests: Sequence[tuple[KernelBatch, Sequence[KernelGroup]]],
    benches: Sequence[tuple[KernelBatch, Sequence[KernelSpeed]]],
) -> tuple[Cell, ...]:
    """Return one cell per operator and back end; batches come newest first."""
    groups = [(batch, {(g.operator, g.backend): g for g in found}) for batch, found in tests]
    timed = [(batch, _by_key(found)) for batch, found in benches]
    keys = [*_keys(each for _, each in groups), *_keys(each for _, each in timed)]
    return tuple(_cell(key, groups, timed) for key in dict.fromkeys(keys))


def remarked(
    cells: Iterable[Cell], remarks: Mapping[str, Mapping[Key, Remarks]]
) -> tuple[Cell, ...]:
    """Return cells with what was said in their batch; `remarks` are by batch, then by cell."""
    return tuple(
        cell
        if cell.batch is None
        else replace(cell, remarks=remarks.get(cell.batch.id, {}).get(cell.key, _SILENT))
        for cell in cells
    )


def names(cells: Iterable[Cell]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return operators and back ends, each once, in the order in which they were tested."""
    found = tuple(cells)
    operators = dict.fromkeys(cell.operator for cell in found)
    return tuple(operators), tuple(dict.fromkeys(cell.backend for cell in found))


def share(error: float | None, tolerance: float) -> float | None:
    """Return error ÷ tolerance; a tolerance of 0 allows 0 only. None where nothing was compared."""
    if error is None:
        return None
    if not math.isfinite(error):
        return math.inf
    if error == 0:
        return 0.0
    return error / tolerance if tolerance else math.inf


def places(cases: Iterable[KernelCase]) -> dict[tuple[str, tuple[int, ...]], dict[str, Place]]:
    """Return by variant and shape, and by dtype within, how the layouts did."""
    gathered: dict[tuple[str, tuple[int, ...]], dict[str, list[KernelCase]]] = {}
    for case in cases:
        row = gathered.setdefault((case.variant, case.shape), {})
        row.setdefault(case.dtype, []).append(case)
    return {
        key: {dtype: _place(found) for dtype, found in row.items()} for key, row in gathered.items()
    }


def _place(cases: Sequence[KernelCase]) -> Place:
    statuses = [case.status for case in cases]
    shares = [share(case.error, case.tolerance) for case in cases if case.status != NOT_APPLICABLE]
    return Place(
        statuses.count(PASSED),
        statuses.count(FAILED),
        statuses.count(NOT_APPLICABLE),
        max((s for s in shares if s is not None), default=None),
        next((case.message for case in cases if case.message), ""),
    )


def _keys(found: Iterable[Mapping[Key, object]]) -> Iterable[Key]:
    return (key for each in found for key in each)


def _by_key(speeds: Iterable[KernelSpeed]) -> dict[Key, list[KernelSpeed]]:
    found: dict[Key, list[KernelSpeed]] = {}
    for speed in speeds:
        found.setdefault((speed.operator, speed.backend), []).append(speed)
    return found


def _cell(
    key: Key,
    groups: Sequence[tuple[KernelBatch, Mapping[Key, KernelGroup]]],
    timed: Sequence[tuple[KernelBatch, Mapping[Key, list[KernelSpeed]]]],
) -> Cell:
    newest = next(((batch, each[key]) for batch, each in groups if key in each), (None, None))
    shares = [each[key].worst_share if key in each else None for _, each in groups]
    return Cell(*key, newest[1], newest[0], tuple(reversed(shares)), _speed(key, timed))


def _speed(
    key: Key, timed: Sequence[tuple[KernelBatch, Mapping[Key, list[KernelSpeed]]]]
) -> Speed | None:
    newest = next(((batch, each[key]) for batch, each in timed if key in each), None)
    if newest is None:
        return None
    batch, speeds = newest
    trend = [median(s.ratio for s in each[key]) if key in each else None for _, each in timed]
    return Speed(
        median(s.ratio for s in speeds),
        min(speeds, key=lambda s: s.ratio),
        max(speeds, key=lambda s: s.ratio),
        len(speeds),
        batch,
        tuple(reversed(trend)),
    )
