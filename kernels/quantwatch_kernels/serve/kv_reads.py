"""Who reads which stored token: what a query of a teacher-forced pass would find in the cache.

Tokens come in chunks (`Arrivals`): the first `prefill` at once, then `chunk` at a time. A cache
either takes a chunk's keys in before its queries are answered, so that these find codes of their
own chunk (`own = "codes"`: paged servers, llama.cpp), or afterwards, so that a chunk sees itself in
full precision (`own = "exact"`: transformers' cache, KIVI, GEAR). A query of a chunk that ends at e
and begins at s thus finds n = e or n = s tokens stored, of which `KVScheme.stored_end(n)` decides
what is codes by then. That depends on positions alone: one pass over a whole text can mix, for each
pair of query and key, full precision and codes exactly as a prefill and `generate` would.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quantwatch_kernels.serve.kv_policy import KVScheme

__all__ = ["ONE_BY_ONE", "Arrivals", "reads_codes"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How a text comes into the cache. Raises ValueError for a chunk without tokens."""

    prefill: int = 0
    chunk: int = 1
    own: Literal["codes", "exact"] = "codes"

    def __post_init__(self) -> None:
        if self.prefill < 0 or self.chunk < 1:
            raise ValueError(
                f"a prefill has 0 tokens or more, a chunk at least 1; not {self.prefill} and "
                f"{self.chunk}."
            )

    def found(self, position: int, tokens: int) -> int:
        """Return how many tokens are stored when the query at `position` is answered."""
        if position < self.prefill:
            start, end = 0, self.prefill
        else:
            start = position - (position - self.prefill) % self.chunk
            end = start + self.chunk
        return min(end, tokens) if self.own == "codes" else start


ONE_BY_ONE = Arrivals()
"""Each token is stored before it is attended to."""


def reads_codes(scheme: KVScheme, queries: int, keys: int, arrivals: Arrivals) -> Tensor:
    """Return bool [queries, keys]: whether the query finds codes in place of the key's numbers.

    The queries are the last ones of a sequence of `keys` tokens. Raises ValueError for more queries
    than keys.
    """
    if queries > keys:
        raise ValueError(f"{queries} queries can't be the last of {keys} tokens.")
    found = [arrivals.found(t, keys) for t in range(keys - queries, keys)]
    ends = torch.tensor([scheme.stored_end(n) for n in found])
    position = torch.arange(keys)
    return (position >= scheme.sinks) & (position < ends[:, None])
