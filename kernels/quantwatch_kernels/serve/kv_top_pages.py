"""Which pages a query reads in full precision: those that could matter most to it.

Of each page of keys the least and the greatest number of each feature are kept, in 16 bits. With
them no key of the page can have a larger product with q than

    bound(q, page) = Σ_d max(q_d·min_d, q_d·max_d) = q⁺·max − q⁻·min

(up to the rounding of the bounds; Quest, 2406.10774). The query heads that share a key head choose
together, by the largest bound among them: what is fetched is fetched once. Only whole pages that
are stored as codes and that the query sees can be chosen. Values stay codes: what is recomputed is
q·k, where an error is multiplied by the softmax.
"""

import torch
from torch import Tensor

from quantwatch_kernels.serve.kv_policy import KVScheme

__all__ = ["HostKeys", "choose", "chosen_keys", "page_bounds"]


def page_bounds(keys_BHnD: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Return min and max, float16 [B, H, pages, D]. Raises ValueError for a part of a page."""
    batch, heads, tokens, features = keys_BHnD.shape
    if tokens % page:
        raise ValueError(f"{tokens} tokens are no whole pages of {page}.")
    pages = keys_BHnD.reshape(batch, heads, tokens // page, page, features)
    return pages.amin(-2).half(), pages.amax(-2).half()


class HostKeys:
    """All keys behind the sinks in host memory; bounds of their whole pages beside the codes."""

    def __init__(self, none_BHnD: Tensor, page: int) -> None:
        """Keep nothing yet: `none_BHnD` has no tokens, but shape, dtype and device of the keys."""
        self.keys = none_BHnD.cpu()
        self.bounds = page_bounds(none_BHnD, page)
        self._page = page

    def add(self, keys_BHnD: Tensor) -> None:
        """Keep new tokens' keys, and bounds of the pages that became whole."""
        self.keys = torch.cat([self.keys, keys_BHnD.cpu()], -2)
        begin = self.bounds[0].shape[-2] * self._page
        end = self.keys.shape[-2] // self._page * self._page
        added = page_bounds(self.keys[..., begin:end, :], self._page)
        low, high = (torch.cat([o, n.to(o)], -2) for o, n in zip(self.bounds, added, strict=True))
        self.bounds = low, high


def chosen_keys(
    query: Tensor, keys: Tensor, scheme: KVScheme, codes_read: Tensor, seen: Tensor
) -> Tensor:
    """Return bool [B, Hkv, Tq, Tk]: keys whose product with the query is made in full precision.

    Queries [B, Hq, Tq, D], keys [B, Hkv, Tk, D], `codes_read` bool [Tq, Tk], `seen` bool that
    broadcasts to [B, 1, Tq, Tk].
    """
    first = min(scheme.sinks, keys.shape[-2])
    end = first + (keys.shape[-2] - first) // scheme.page * scheme.page
    bounds = page_bounds(keys[..., first:end, :], scheme.page)
    return choose(query, bounds, scheme, codes_read, seen)


def choose(
    query: Tensor,
    bounds: tuple[Tensor, Tensor],
    scheme: KVScheme,
    codes_read: Tensor,
    seen: Tensor,
) -> Tensor:
    """Return what `chosen_keys` does, from the bounds [B, Hkv, pages, D] of the whole pages."""
    low, high = (x.float() for x in bounds)
    (batch, shared, count, _), (queries, tokens) = low.shape, codes_read.shape[-2:]
    first, page = min(scheme.sinks, tokens), scheme.page
    chosen = torch.zeros(batch, shared, queries, tokens, dtype=torch.bool, device=low.device)
    if count == 0 or queries == 0:
        return chosen
    end = first + count * page
    q = query.float().reshape(batch, shared, -1, queries, query.shape[-1])
    largest = q.clamp(min=0) @ high[:, :, None].mT + q.clamp(max=0) @ low[:, :, None].mT
    readable = (codes_read & seen)[..., first:end]
    candidates = readable.reshape(*readable.shape[:-1], count, page).any(-1)
    largest = largest.amax(2).masked_fill(~candidates, -torch.inf)
    best = largest.topk(min(scheme.top_pages, count), -1)
    picked = torch.zeros_like(largest, dtype=torch.bool)
    picked.scatter_(-1, best.indices, best.values > -torch.inf)
    chosen[..., first:end] = picked.repeat_interleave(page, -1)
    return chosen
