"""Precision-regression monitoring for language models.

`quantwatch.compare(reference, candidate, token_ids)` compares two modules in memory; everything
else is reached through the command `quantwatch` and the dashboard.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantwatch.pipeline import compare

__version__ = "0.1.0"
__all__ = ["__version__", "compare"]


def __getattr__(name: str) -> Any:
    """Import `compare` on first use: it needs torch, and `import quantwatch` must stay quick."""
    if name == "compare":
        from quantwatch.pipeline import compare

        return compare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
