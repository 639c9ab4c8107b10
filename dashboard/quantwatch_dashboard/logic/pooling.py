"""Shrink a matrix to what a browser can draw without losing its peak.

A cell of the pooled matrix shows the worst cell it stands for: NaN before +∞ before the largest
number before 0 before −∞ before "not measured". A mean would hide the one bad token one looks for.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_CELLS, MAX_ROWS, MAX_COLUMNS = 30_000, 600, 2_000
"""With a text for every cell and label such a figure stays below 2 MB (tests hold it)."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """A pooled matrix and the first original index of each of its rows and columns."""

    values: NDArray[np.float64]
    missing: NDArray[np.bool_]
    row_starts: NDArray[np.int64]
    column_starts: NDArray[np.int64]


def max_pool(
    values: NDArray[np.float64],
    missing: NDArray[np.bool_],
    max_cells: int = MAX_CELLS,
    *,
    lowest: bool = False,
) -> Pooled:
    """Pool columns, then rows if one column is still too tall, until at most `max_cells` are left.

    With `lowest` small values are the bad ones, and −∞ is worse than every number.

    Raises ValueError when the shapes differ or the matrix has no cell.
    """
    if values.shape != missing.shape or values.ndim != 2 or values.size == 0:
        raise ValueError(
            "a heatmap needs a matrix with cells and a mask of the same shape, "
            f"got {values.shape} and {missing.shape}"
        )
    rows, columns = values.shape
    row_step = math.ceil(rows / min(rows, max_cells, MAX_ROWS))
    height = math.ceil(rows / row_step)
    column_step = math.ceil(columns / max(1, min(columns, max_cells // height, MAX_COLUMNS)))
    row_starts = np.arange(0, rows, row_step)
    column_starts = np.arange(0, columns, column_step)
    ranks = _ranked(-values if lowest else values, missing)
    pooled = np.maximum.reduceat(
        np.maximum.reduceat(ranks, row_starts, axis=0), column_starts, axis=1
    )
    shown, gone = _unranked(pooled)
    return Pooled(-shown if lowest else shown, gone, row_starts, column_starts)


_NAN_RANK = np.finfo(np.float64).max
_INF_RANK = np.finfo(np.float64).max / 2
_NEGATIVE_INF_RANK = -np.finfo(np.float64).max


def _ranked(values: NDArray[np.float64], missing: NDArray[np.bool_]) -> NDArray[np.float64]:
    ranks = np.clip(values, _NEGATIVE_INF_RANK, _INF_RANK)
    ranks[np.isnan(values)] = _NAN_RANK
    ranks[missing] = -np.inf
    return ranks


def _unranked(ranks: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    missing = ranks == -np.inf
    values = ranks.copy()
    values[ranks == _INF_RANK] = np.inf
    values[ranks == _NEGATIVE_INF_RANK] = -np.inf
    values[(ranks == _NAN_RANK) | missing] = np.nan
    return values, missing
