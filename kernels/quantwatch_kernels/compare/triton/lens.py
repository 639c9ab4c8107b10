"""The lens in one pass on a GPU: the algebra of `lens.cpp`, a block of rows per program.

Rows of both models are multiplied with a block of ids at a time; what is kept of a row are six
numbers and its five largest logits. The vocabulary is split between programs where rows alone
would leave a GPU idle, and the parts' sums are moved to one maximum and one centre afterwards. n
rows, H hidden width, V ids, S splits.

Products are float32 (`ieee`, not TF32), rounded to the head's dtype as its own product would be.
Differences and running sums are float64, the exponentials float32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Finish", "fused_sums_triton"]

_ROWS, _IDS, _WIDTH = 16, 64, 64
_PROGRAMS = 256
"""About so many are wanted at least; a GPU has 80 to 150 processors."""
_MIN_IDS = 2048
"""A program takes at least so many ids, or the sums of parts outweigh the parts."""
_CLOSED_BOUND = 60.0
_TOP = 5


class Finish(NamedTuple):
    """What turns products into logits, as in `Readout.finish`."""

    scale: float = 1.0
    softcap: float | None = None


@triton.jit
def _logits(
    h, w, m, ids, M, V, H, h_m, h_d, w_v, w_d, SCALE, CAP, HAS_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, H, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        at = m.to(tl.int64)[:, None] * h_m + d[None, :] * h_d
        rows = tl.load(h + at, mask=(m[:, None] < M) & (d[None, :] < H), other=0.0)
        at = ids.to(tl.int64)[None, :] * w_v + d[:, None] * w_d
        head = tl.load(w + at, mask=(ids[None, :] < V) & (d[:, None] < H), other=0.0)
        total = tl.dot(rows, head, total, input_precision="ieee")
    z = total.to(w.dtype.element_ty).to(tl.float32) * SCALE
    if HAS_CAP:
        # tanh by e^-2|x|, which neither overflows nor depends on a library.
        x = z / CAP
        decay = tl.exp(-2.0 * tl.abs(x))
        size = (1.0 - decay) / (1.0 + decay)
        z = tl.where(x < 0, -size, size) * CAP
    return z


@triton.jit
def _series(x):
    p = 1.0 / 40320 * -x + 1.0 / 5040
    p = p * -x + 1.0 / 720
    p = p * -x + 1.0 / 120
    p = p * -x + 1.0 / 24
    p = p * -x + 1.0 / 6
    p = p * -x + 0.5
    return p * x * x


@triton.jit
def _beyond_linear(t):
    """e^t − 1 − t in float64: the series where the difference would cancel."""
    small = t * t * (0.5 + t * (1.0 / 6 + t * (1.0 / 24 + t * (1.0 / 120 + t * (1.0 / 720)))))
    return tl.where(tl.abs(t) < 0.01, small, tl.exp(t) - 1.0 - t)


@triton.jit
def _moved(total, drift, excess, t, kept):
    """Sums about a centre that is t higher, and below a maximum to which e^z is `kept` times."""
    beyond = _beyond_linear(t)
    excess = kept * (excess + (beyond + t) * (excess - drift) + beyond * total)
    return kept * total, kept * (drift - t * total), excess


@triton.jit
def _entered(best, theirs, held, z, y, ids, V, spoiled, TOP: tl.constexpr):
    """The largest logits, the other model's at the same ids, and the ids, after a block of ids."""
    for _ in range(TOP):
        peak = tl.max(z, 1)
        least = tl.min(best, 1)
        enters = (peak > least) & (spoiled == 0)
        if tl.max(enters.to(tl.int32), 0) > 0:
            first = tl.min(tl.where(z == peak[:, None], ids[None, :], V), 1)
            is_first = ids[None, :] == first[:, None]
            at_peak = tl.sum(tl.where(is_first, y, 0.0), 1)
            # Of equal least ones the latest id goes.
            is_least = best == least[:, None]
            latest = tl.max(tl.where(is_least, held, -1), 1)
            goes = enters[:, None] & is_least & (held == latest[:, None])
            best = tl.where(goes, peak[:, None], best)
            theirs = tl.where(goes, at_peak[:, None], theirs)
            held = tl.where(goes, first[:, None], held)
            z = tl.where(is_first, -float("inf"), z)
    return best, theirs, held


@triton.jit
def _lens(
    h, g, w, sums, top, other, top_ids, M, V, H, h_m, h_d, g_m, g_d, w_v, w_d, PER_SPLIT,
    SCALE, CAP, HAS_CAP: tl.constexpr, HELD: tl.constexpr, TOP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    begin = split * PER_SPLIT
    end = tl.minimum(begin + PER_SPLIT, V)
    maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float64)
    drift = tl.zeros((BLOCK_M,), tl.float64)
    excess = tl.zeros((BLOCK_M,), tl.float64)
    centre = tl.zeros((BLOCK_M,), tl.float64)
    largest = tl.zeros((BLOCK_M,), tl.float64)
    spoiled = tl.zeros((BLOCK_M,), tl.int32)
    slot = tl.arange(0, HELD)
    # Slots beyond the top can't be replaced: their value is never the least.
    best = tl.zeros((BLOCK_M, HELD), tl.float32)
    best += tl.where(slot[None, :] < TOP, -float("inf"), float("inf"))
    theirs = tl.zeros((BLOCK_M, HELD), tl.float32)
    held = tl.zeros((BLOCK_M, HELD), tl.int32) + V + slot[None, :]
    for start in range(begin, end, BLOCK_N):
        ids = start + tl.arange(0, BLOCK_N)
        inside = (ids < end)[None, :]
        z = _logits(h, w, m, ids, M, V, H, h_m, h_d, w_v, w_d, SCALE, CAP, HAS_CAP,
                    BLOCK_M, BLOCK_N, BLOCK_D)  # fmt: skip
        y = _logits(g, w, m, ids, M, V, H, g_m, g_d, w_v, w_d, SCALE, CAP, HAS_CAP,
                    BLOCK_M, BLOCK_N, BLOCK_D)  # fmt: skip
        finite = (tl.abs(z) <= 3.4028234663852886e38) & (tl.abs(y) <= 3.4028234663852886e38)
        odd = inside & (finite == 0)
        spoiled = tl.maximum(spoiled, tl.max(odd.to(tl.int32), 1))
        z = tl.where(inside & (spoiled[:, None] == 0), z, -float("inf"))
        y = tl.where(inside & (spoiled[:, None] == 0), y, 0.0)

        peak = tl.max(z, 1)
        first = tl.min(tl.where(z == peak[:, None], ids[None, :], V), 1)
        at_peak = tl.sum(tl.where(ids[None, :] == first[:, None], y, 0.0), 1)
        higher = (peak > maximum) & (spoiled == 0)
        c = tl.where(higher, peak.to(tl.float64) - at_peak.to(tl.float64), centre)
        t = tl.where(total == 0.0, 0.0, c - centre)
        rises = higher & (total > 0.0)
        behind = tl.where(rises, maximum, 0.0) - tl.where(rises, peak, 0.0)
        total, drift, excess = _moved(total, drift, excess, t, tl.exp(behind))
        largest += tl.abs(t)
        centre = c
        maximum = tl.where(higher, peak, maximum)

        best, theirs, held = _entered(best, theirs, held, z, y, ids, V, spoiled, TOP)

        counted = inside & (spoiled[:, None] == 0)
        x64 = z.to(tl.float64) - y.to(tl.float64) - centre[:, None]
        x = tl.where(counted, x64, 0.0).to(tl.float32)
        reach = tl.abs(x)
        largest = tl.maximum(largest, tl.max(reach, 1).to(tl.float64))
        x = tl.where(reach > 60.0, 0.0, x)
        term = tl.where(reach < 0.5, _series(x), tl.exp(-x) - 1.0 + x)
        below = tl.where(counted, z, 0.0) - tl.where(spoiled == 0, maximum, 0.0)[:, None]
        e = tl.where(counted, tl.exp(tl.where(counted, below, 0.0)), 0.0)
        total += tl.sum(e.to(tl.float64), 1)
        drift += tl.sum((e * x).to(tl.float64), 1)
        excess += tl.sum((e * term).to(tl.float64), 1)

    real = m < M
    at = split.to(tl.int64) * 7 * M + m
    tl.store(sums + at, maximum.to(tl.float64), mask=real)
    tl.store(sums + at + M, total, mask=real)
    tl.store(sums + at + 2 * M, drift, mask=real)
    tl.store(sums + at + 3 * M, excess, mask=real)
    tl.store(sums + at + 4 * M, centre, mask=real)
    tl.store(sums + at + 5 * M, largest, mask=real)
    tl.store(sums + at + 6 * M, spoiled.to(tl.float64), mask=real)
    at = (split.to(tl.int64) * M + m.to(tl.int64)[:, None]) * TOP + slot[None, :]
    kept_slots = real[:, None] & (slot[None, :] < TOP)
    tl.store(top + at, best, mask=kept_slots)
    tl.store(other + at, theirs, mask=kept_slots)
    tl.store(top_ids + at, held, mask=kept_slots)


def fused_sums_triton(
    pair: tuple[Tensor, Tensor], weight: Tensor, finish: Finish
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `lens_native.fused_sums` does: KL, NaN where a row needs float64, deviations.

    Normed hidden states [n, H] of both models in the head's dtype, weight [V, H]; any strides.
    """
    (h, g), (M, H), V = pair, pair[0].shape, len(weight)
    if not M:
        none = torch.zeros(0, dtype=torch.float64, device=h.device)
        return none, none, none
    blocks = triton.cdiv(M, _ROWS)
    splits = max(1, min(triton.cdiv(_PROGRAMS, blocks), V // _MIN_IDS))
    per_split = triton.cdiv(triton.cdiv(V, splits), _IDS) * _IDS
    splits = triton.cdiv(V, per_split)
    sums = torch.empty(splits, 7, M, dtype=torch.float64, device=h.device)
    top, other = (torch.empty(splits, M, _TOP, device=h.device) for _ in range(2))
    ids = torch.empty(splits, M, _TOP, dtype=torch.int32, device=h.device)
    _lens[blocks, splits](
        h, g, weight, sums, top, other, ids, M, V, H, *h.stride(), *g.stride(), *weight.stride(),
        per_split, finish.scale, finish.softcap or 1.0, HAS_CAP=finish.softcap is not None,
        HELD=8, TOP=_TOP, BLOCK_M=_ROWS, BLOCK_N=_IDS, BLOCK_D=_WIDTH, enable_fp_fusion=False,
    )  # fmt: skip
    gaps = _gaps(top, other, ids)[:, : min(V, _TOP)]
    return _divergence(sums), gaps.mean(-1), gaps[:, :3].mean(-1)


def _divergence(sums: Tensor) -> Tensor:
    """Move the parts' sums [S, 7, n] to one maximum and centre; see `lens.cpp` for the algebra."""
    maximum, total, drift, excess, centre, largest, spoiled = sums.unbind(1)
    best, where = maximum.max(0)
    t = centre.gather(0, where[None]) - centre
    growth, kept = torch.expm1(t), torch.exp(maximum - best)
    excess = kept * (excess + growth * (excess + total - drift) - t * total)
    drift, total = kept * (drift - t * total), kept * total
    total, drift, excess = total.sum(0), drift.sum(0), excess.sum(0)
    kl = torch.log1p((excess - drift) / total) + drift / total
    wild = (spoiled != 0).any(0) | ~((largest + t.abs()).amax(0) <= _CLOSED_BOUND)
    return kl.masked_fill(wild, torch.nan)


def _gaps(top: Tensor, other: Tensor, ids: Tensor) -> Tensor:
    """Return |Δ| float64 [n, 5] at the largest logits of all parts; of equal ones the first ids."""
    value, theirs, number = (x.transpose(0, 1).flatten(1) for x in (top, other, ids))
    order = number.sort(dim=-1, stable=True).indices
    ranked = value.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices
    chosen = order.gather(-1, ranked)[:, :_TOP]
    return (value.double() - theirs.double()).abs().gather(-1, chosen)
