"""Who reads which stored token: what a query of a teacher-forced pass would find in the cache.

A cache answers a chunk of queries after it has taken the chunk's keys in. So a query at position t
of a sequence whose first `prefill` tokens come at once, and then one by one, finds
n = max(t + 1, prefill) tokens, of which `KVScheme.stored_end(n)` decides what is codes by then.
That depends on positions alone: one pass over a whole text can mix, for each pair of query and key,
full precision and codes exactly as a prefill and `generate` would.
"""

import torch
from torch import Tensor

from quantwatch_kernels.serve.kv_scheme import KVScheme

__all__ = ["reads_codes"]


def reads_codes(scheme: KVScheme, queries: int, keys: int, prefill: int = 0) -> Tensor:
    """Return bool [queries, keys]: whether the query finds codes in place of the key's numbers.

    The queries are the last ones of a sequence of `keys` tokens. Raises ValueError for more queries
    than keys.
    """
    if queries > keys:
        raise ValueError(f"{queries} queries can't be the last of {keys} tokens.")
    found = [max(t + 1, min(prefill, keys)) for t in range(keys - queries, keys)]
    ends = torch.tensor([scheme.stored_end(n) for n in found])
    position = torch.arange(keys)
    return (position >= scheme.sinks) & (position < ends[:, None])
