"""Where values stop being finite: the first place in forward order, token by token. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantwatch.report.figures import forward_order
from quantwatch_dashboard.logic.grid import TokenGrid, TokenPlace


@dataclass(frozen=True, slots=True)
class Birth:
    """One token: the first scope at which it is not finite, and what it is there."""

    place: TokenPlace
    scope: str
    value: float

    @property
    def kind(self) -> str:
        """`NaN`, `+∞` or `−∞`."""
        return "NaN" if math.isnan(self.value) else "+∞" if self.value > 0 else "−∞"


@dataclass(frozen=True, slots=True, eq=False)
class Births:
    """The tokens of one prompt that are not finite, in their order: a row of numbers for each.

    Arrays, since a prompt may have 30,000 such tokens. `scopes` are in forward order; `rows` is the
    first of them, and `values` what is there.
    """

    scopes: tuple[str, ...]
    places: tuple[TokenPlace, ...]
    rows: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.places)

    def earliest(self, most: int) -> list[Birth]:
        """Return the births with the earliest scopes, then tokens: a late one only inherits."""
        return [self._birth(int(j)) for j in np.argsort(self.rows, kind="stable")[:most]]

    def _birth(self, j: int) -> Birth:
        return Birth(self.places[j], self.scopes[self.rows[j]], float(self.values[j]))


def births_of(grids: Sequence[TokenGrid]) -> Births:
    """Return the tokens that are not finite anywhere, in token order.

    The grids are of one prompt; what is measured at a scope in several of them counts once.
    """
    scopes = sorted({s for grid in grids for s in grid.scopes}, key=forward_order)
    at = {scope: row for row, scope in enumerate(scopes)}
    known = {place.position: place for grid in grids for place in grid.places}
    places = [known[position] for position in sorted(known)]
    column = {place.position: j for j, place in enumerate(places)}
    rows = np.full(len(places), len(scopes), np.int64)
    values = np.full(len(places), np.nan)
    for grid in grids:
        bad = ~np.isfinite(grid.values) & ~grid.missing
        order = np.array(
            sorted(range(len(grid.scopes)), key=lambda i: at[grid.scopes[i]]), np.int64
        )
        hit = np.flatnonzero(bad.any(axis=0))
        own = order[bad[order][:, hit].argmax(axis=0)]
        found = np.array([at[scope] for scope in grid.scopes], np.int64)[own]
        there = np.array([column[grid.places[j].position] for j in hit], np.int64)
        sooner = found < rows[there]
        rows[there[sooner]] = found[sooner]
        values[there[sooner]] = grid.values[own[sooner], hit[sooner]]
    kept = np.flatnonzero(rows < len(scopes))
    return Births(tuple(scopes), tuple(places[j] for j in kept), rows[kept], values[kept])


@dataclass(frozen=True, slots=True)
class PromptBirth:
    """The first non-finite value of one prompt, and how many of its tokens have any."""

    first: Birth
    num_tokens: int


def prompt_birth(births: Births) -> PromptBirth | None:
    """Return a prompt's first birth: the earliest scope in forward order, then the token.

    None when the prompt is finite.
    """
    return PromptBirth(births.earliest(1)[0], len(births)) if len(births) else None
