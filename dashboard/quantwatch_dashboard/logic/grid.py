"""One metric over layers and tokens: what a heatmap draws."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantwatch_dashboard import text


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """Where a column comes from. `piece` is the token's text, None where it was not stored."""

    prompt: int
    position: int
    token_id: int
    piece: str | None

    def label(self, length: int = 14) -> str:
        """Return the token for people; not unique."""
        return text.token(self.piece, self.token_id, length)


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """One metric of one candidate, by scope (rows) and place (columns), in the metric's unit.

    `missing` marks cells that were not measured; their values mean nothing.
    """

    scopes: tuple[str, ...]
    places: tuple[TokenPlace, ...]
    values: NDArray[np.float64]
    missing: NDArray[np.bool_]
    estimated: NDArray[np.bool_] | None = None
    """Measured cells that are estimates; None where none is."""

    @property
    def num_measured(self) -> int:
        """Number of measured cells."""
        return int((~self.missing).sum())

    def measured_only(self) -> "TokenGrid":
        """Return the grid without the columns in which no cell was measured."""
        kept = np.flatnonzero(~self.missing.all(axis=0))
        places = tuple(self.places[j] for j in kept)
        return replace(self, places=places, **self._cells(np.s_[:, kept]))

    def rows(self, wanted: Collection[str]) -> "TokenGrid":
        """Return the grid with only these scopes, in the order of the grid."""
        kept = [i for i, scope in enumerate(self.scopes) if scope in wanted]
        scopes = tuple(self.scopes[i] for i in kept)
        return replace(self, scopes=scopes, **self._cells(np.s_[kept]))

    def normalised(self) -> "TokenGrid":
        """Return each cell ÷ the largest finite value of its layer; layers of zeros stay zero."""
        finite = np.where(np.isfinite(self.values) & ~self.missing, self.values, 0.0)
        largest = finite.max(axis=1, keepdims=True, initial=0.0)
        return replace(self, values=self.values / np.where(largest > 0, largest, 1.0))

    def between(self, first: int, last: int) -> "TokenGrid":
        """Return the grid with only the tokens at these positions, both ends included."""
        kept = [j for j, place in enumerate(self.places) if first <= place.position <= last]
        part = slice(kept[0], kept[-1] + 1) if kept else slice(0, 0)
        return replace(self, places=self.places[part], **self._cells(np.s_[:, part]))

    def _cells(self, part: Any) -> dict[str, Any]:
        """Return the matrices of a part."""
        estimated = None if self.estimated is None else self.estimated[part]
        return {
            "values": self.values[part], "missing": self.missing[part], "estimated": estimated,
        }  # fmt: skip

    def column(self, token: tuple[int, int] | None) -> int | None:
        """Return where a token (prompt and position) is, None when it is not in the grid."""
        places = enumerate(self.places)
        return next((j for j, p in places if (p.prompt, p.position) == token), None)

    def worst_cell(self, *, lowest: bool = False) -> tuple[int, int] | None:
        """Return row and column of the first NaN, else of the largest value, or the `lowest`."""
        if not self.num_measured:
            return None
        signed = -self.values if lowest else self.values
        ranked = np.where(np.isnan(signed), np.inf, signed)
        row, column = np.unravel_index(
            int(np.where(self.missing, -np.inf, ranked).argmax()), ranked.shape
        )
        return int(row), int(column)


def side_by_side(grids: Sequence[TokenGrid]) -> TokenGrid:
    """Join grids of all prompts. Raises ValueError when their scopes differ."""
    if len({grid.scopes for grid in grids}) != 1:
        raise ValueError("only grids of the same scopes can stand side by side")
    return TokenGrid(
        grids[0].scopes,
        tuple(place for grid in grids for place in grid.places),
        np.concatenate([grid.values for grid in grids], axis=1),
        np.concatenate([grid.missing for grid in grids], axis=1),
        _joined([grid.estimated for grid in grids], [grid.missing.shape for grid in grids]),
    )


def _joined(
    masks: Sequence[NDArray[np.bool_] | None], shapes: Sequence[tuple[int, ...]]
) -> NDArray[np.bool_] | None:
    if all(mask is None for mask in masks):
        return None
    pairs = zip(masks, shapes, strict=True)
    return np.concatenate([np.zeros(s, np.bool_) if m is None else m for m, s in pairs], axis=1)
