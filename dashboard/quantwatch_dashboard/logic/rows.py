"""Which rows of a grid a picture shows."""

from quantwatch.domain import EMBEDDING, FINAL_NORM, MODEL, is_layer
from quantwatch_dashboard.logic.grid import TokenGrid


def whole_layers(grid: TokenGrid) -> TokenGrid:
    """Return the layers, and what lies before and after them."""
    return grid.rows([s for s in grid.scopes if is_layer(s) or s in (EMBEDDING, FINAL_NORM)])


def with_parts(grid: TokenGrid) -> TokenGrid:
    """Return every row but the output's own."""
    return grid.rows(set(grid.scopes) - {MODEL})


def has_parts(grid: TokenGrid) -> bool:
    """Say whether attention or MLP have rows of their own."""
    return any(s.startswith("layers.") and not is_layer(s) for s in grid.scopes)
