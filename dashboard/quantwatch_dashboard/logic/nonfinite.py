"""Where values stop being finite: the first place in forward order, token by token. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


def births_of(grids: Sequence[TokenGrid]) -> list[Birth]:
    """Return one birth per token that is not finite anywhere, in token order.

    The grids are of one prompt; what is measured at a scope in several of them counts once.
    """
    first: dict[tuple[int, int], Birth] = {}
    for grid in grids:
        bad = ~np.isfinite(grid.values) & ~grid.missing
        order = sorted(range(len(grid.scopes)), key=lambda i: forward_order(grid.scopes[i]))
        for j in np.flatnonzero(bad.any(axis=0)):
            place = grid.places[j]
            i = next(i for i in order if bad[i, j])
            birth = Birth(place, grid.scopes[i], float(grid.values[i, j]))
            known = first.get((place.prompt, place.position))
            if known is None or forward_order(birth.scope) < forward_order(known.scope):
                first[place.prompt, place.position] = birth
    return [first[key] for key in sorted(first)]


@dataclass(frozen=True, slots=True)
class PromptBirth:
    """The first non-finite value of one prompt, and how many of its tokens have any."""

    first: Birth
    num_tokens: int


def by_prompt(births: Sequence[Birth]) -> list[PromptBirth]:
    """Return each prompt's first birth: the earliest scope in forward order, then the token."""
    prompts: dict[int, list[Birth]] = {}
    for birth in births:
        prompts.setdefault(birth.place.prompt, []).append(birth)
    return [
        PromptBirth(
            min(found, key=lambda b: (forward_order(b.scope), b.place.position)), len(found)
        )
        for found in prompts.values()
    ]
