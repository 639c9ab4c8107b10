"""One grid against another one of the same tokens: signed, positive is worse."""

from dataclasses import replace

import numpy as np

from quantwatch_dashboard.logic.grid import TokenGrid


def ratio(now: TokenGrid, before: TokenGrid) -> TokenGrid:
    """Return log2(now ÷ before) at the places that both have; errors, so more is worse.

    Equal values (two zeros, too) are 0. What came from 0, or is no longer finite, is +∞; what went
    to 0, or is finite again, is −∞; what is finite in neither is NaN.
    """
    now, before = aligned(now, before)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.log2(now.values) - np.log2(before.values)
    values[now.values == before.values] = 0.0
    return _settled(now, before, values)


def loss(now: TokenGrid, before: TokenGrid) -> TokenGrid:
    """Return before − now at the places that both have; headroom, so less is worse."""
    now, before = aligned(now, before)
    with np.errstate(invalid="ignore"):
        values = before.values - now.values
    values[now.values == before.values] = 0.0
    missing = now.missing | before.missing
    return replace(now, values=values, missing=missing)


def _settled(now: TokenGrid, before: TokenGrid, values: np.typing.NDArray[np.float64]) -> TokenGrid:
    bad, was_bad = ~np.isfinite(now.values), ~np.isfinite(before.values)
    values[bad & ~was_bad] = np.inf
    values[~bad & was_bad] = -np.inf
    values[bad & was_bad] = np.nan
    return replace(now, values=values, missing=now.missing | before.missing)


def aligned(now: TokenGrid, before: TokenGrid) -> tuple[TokenGrid, TokenGrid]:
    """Return both grids at the scopes and tokens that they have in common, in the first's order."""
    if now.scopes == before.scopes and now.places == before.places:
        return now, before
    rows = {scope: i for i, scope in enumerate(before.scopes)}
    columns = {(p.prompt, p.position): j for j, p in enumerate(before.places)}
    at_rows = [(i, rows[s]) for i, s in enumerate(now.scopes) if s in rows]
    at_columns = [
        (j, columns[p.prompt, p.position])
        for j, p in enumerate(now.places)
        if (p.prompt, p.position) in columns
    ]
    return _picked(now, at_rows, at_columns, 0), _picked(before, at_rows, at_columns, 1)


def _picked(
    grid: TokenGrid, rows: list[tuple[int, int]], columns: list[tuple[int, int]], which: int
) -> TokenGrid:
    i, j = [pair[which] for pair in rows], [pair[which] for pair in columns]
    cells = np.ix_(np.array(i, np.int64), np.array(j, np.int64))
    return TokenGrid(
        tuple(grid.scopes[k] for k in i),
        tuple(grid.places[k] for k in j),
        grid.values[cells],
        grid.missing[cells],
        None if grid.estimated is None else grid.estimated[cells],
    )
