"""What the scheduler needs of whoever keeps the pages; tests give it a fake."""

from collections.abc import Sequence
from typing import Literal, Protocol

from quantwatch_kernels.serve.block_hash import ExtraKeys
from quantwatch_kernels.serve.block_pool import Writable

__all__ = ["Blocks"]


class Blocks(Protocol):
    """Pages of requests by name. A call that can't be done raises and changes nothing."""

    @property
    def num_usable(self) -> int:
        """Blocks of the pool without the null block."""

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out now, kept content included."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""

    def wanted_to_start(self, tokens: Sequence[int], extra: ExtraKeys) -> int:
        """Return how many free blocks a text takes, all its tokens; shared pages cost nothing."""

    def start(self, name: str, tokens: Sequence[int], extra: ExtraKeys) -> int:
        """Begin, and return how many tokens other requests' pages hold already."""

    def wanted(self, name: str, num_new: int) -> int:
        """Return how many free blocks `reserve` takes."""

    def reserve(self, name: str, num_new: int) -> list[Writable]:
        """Give slots to more tokens; return pages to copy before anything is written."""

    def commit(self, name: str, tokens: Sequence[int]) -> None:
        """Note that the reserved tokens are written."""

    def drop_before(self, name: str, position: int) -> None:
        """Give back pages that hold only tokens before a position."""

    def finish(self, name: str) -> None:
        """End a request and drop its references."""

    def preempt(self, name: str) -> Literal["swap", "recompute"]:
        """Take a request's pages: to the host, or for good."""

    def wanted_back(self, name: str) -> int:
        """Return how many free blocks `resume` takes."""

    def resume(self, name: str) -> None:
        """Bring a request's pages back from the host."""

    def discard(self, name: str) -> None:
        """End a request whose pages are in the host."""
