"""What is kept of a reference's lens distribution, so that few logits of a candidate tell its KL.

Kept per row: the K largest logits, M ids drawn from the rest (the *tail*) in proportion to their
probability, the log-normaliser, the tail's mass and a digest of the hidden state. Of a candidate
only these K + M rows of the head are multiplied (`sketch_estimate.py`): for K = 64, M = 96 and
49,152 ids one product of 307.

The kept logits are the gathered products themselves, not those of the full matrix product that
found them, which rounds otherwise: a hidden state that is equal bit for bit gives equal logits.
With a bfloat16 head products are rounded to bfloat16, as the head itself does.

n rows, H hidden width, V ids.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from quantwatch_kernels.compare.readout import Readout, why_not_pieces
from quantwatch_kernels.compare.sketch_draws import draw_tail, hashes
from quantwatch_kernels.compare.sketch_native import native_head_rows, why_not_gathered
from quantwatch_kernels.compare.topk import top_k
from quantwatch_kernels.compare.workspace import rows_per_chunk, workspace
from quantwatch_kernels.registry import Op

__all__ = [
    "HEAD_ROWS",
    "MIN_TOP",
    "PER_ROW",
    "Sketch",
    "digests",
    "head_rows",
    "join",
    "sketch_rows",
]

MIN_TOP, _MIN_DRAWS = 5, 2
"""The deviation needs the top five, a standard error two draws."""
_MOST_LOGITS, _MOST_ROWS, _FEWEST_ROWS = 6 << 20, 128, 16
"""How much is read off at a time: 25 MB of logits. Half as many rows take 1.2 × the time."""
_GATHERED = 1 << 22
"""Weights that are gathered at a time where there is no compiled code."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """The reference's part of the estimate: a plain record of tensors, one row per hidden state."""

    ids: Tensor
    """The K largest ids, largest first, then the M drawn ones, int32 [n, K + M]."""
    logits: Tensor
    """Their logits, float32 [n, K + M]."""
    log_normalizer: Tensor
    """ln Σ e^z, float64 [n]; NaN without a distribution, +∞ where some logits are −∞."""
    tail_mass: Tensor
    """Probability outside the K largest, float64 [n]."""
    digest: Tensor
    """Of the normed hidden state, int64 [n]: equal ones have equal digests."""
    num_top: int
    """K."""
    width: int
    """V: all ids when K is as large."""

    def rows(self, part: slice | Tensor) -> "Sketch":
        """Return some of the rows."""
        return replace(self, **{name: getattr(self, name)[part] for name in PER_ROW})


PER_ROW = ("ids", "logits", "log_normalizer", "tail_mass", "digest")
"""A sketch's tensors."""


HEAD_ROWS: Op[[Tensor, Tensor, Readout], Tensor] = Op("head_rows")


def sketch_rows(h_ref: Tensor, readout: Readout, k: int, m: int, seeds: Tensor) -> Sketch:
    """Sketch hidden states [n, H]: k largest logits, m draws from the tail by int64 `seeds` [n].

    Of at most k ids all are kept. Raises ValueError for shapes that don't fit, k < 5 or m < 2.
    """
    if h_ref.ndim != 2 or seeds.shape != h_ref.shape[:1] or seeds.dtype != torch.int64:
        raise ValueError(
            f"hidden states must be [n, width] and seeds int64 [n]; they are {list(h_ref.shape)} "
            f"and {seeds.dtype} {list(seeds.shape)}."
        )
    if k < MIN_TOP or m < _MIN_DRAWS:
        raise ValueError(f"k must be at least {MIN_TOP} and m at least {_MIN_DRAWS}: {k}, {m}.")
    with torch.no_grad():
        # One chunk even of nothing: the vocabulary's width is the head's to say.
        rows = _rows_at_a_time(readout)
        parts = zip(torch.split(h_ref, rows), torch.split(seeds, rows), strict=True)
        return join([_sketch(h, readout, (k, m), seed) for h, seed in parts])


def head_rows(normed: Tensor, ids: Tensor, readout: Readout) -> Tensor:
    """Return the float32 logits [n, k] of normed hidden states [n, H] at int32 `ids` [n, k]."""
    usual = "native" if normed.device.type == "cpu" else "aten"
    return HEAD_ROWS.run(HEAD_ROWS.preferred(usual), normed, ids, readout)


def digests(normed: Tensor) -> Tensor:
    """Return Σ_j bits_j·odd_j mod 2⁶⁴ of each row [n, H] of any float dtype, int64 [n].

    −0 counts as 0. Rows that differ have equal digests by a chance of about 2⁻⁶⁴.
    """
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    factors = _odd_numbers(normed.shape[1]).to(normed.device)
    parts = [
        ((part + 0.0).contiguous().view(kinds[part.element_size()]).long() * factors).sum(-1)
        for part in torch.split(normed, rows_per_chunk(normed.shape[1]))
    ]
    return torch.cat(parts)


def _rows_at_a_time(readout: Readout) -> int:
    width = getattr(readout.head, "out_features", None) or _MOST_LOGITS // _MOST_ROWS
    return max(_FEWEST_ROWS, min(_MOST_LOGITS // width, _MOST_ROWS))


@functools.cache
def _odd_numbers(count: int) -> Tensor:
    drawn = hashes(torch.zeros(1, dtype=torch.int64), count)[0]
    return torch.from_numpy(drawn.view(np.int64) | 1)


def _sketch(h: Tensor, readout: Readout, size: tuple[int, int], seeds: Tensor) -> Sketch:
    normed = readout.normed(h)
    logits = readout.head_logits(normed, into="reference logits")
    k = min(size[0], logits.shape[1])
    top_logit = logits.amax(-1)
    normal = top_logit.isfinite() & logits.amin(-1).isfinite()
    if not bool(normal.all()):
        logits = torch.where(normal[:, None], logits, 0.0)
    top = top_k(logits, k)
    # Fresh memory for as many masses as logits would cost three times the exponentials.
    masses = workspace.take_like("sketch masses", logits)
    torch.sub(logits, logits.gather(1, top[:, :1]), out=masses).exp_()
    inside = masses.gather(1, top).double().sum(-1)
    tail = draw_tail(masses, top, size[1], seeds)
    total = inside + tail.mass
    ids = torch.cat([top, tail.ids], dim=1).int()
    odd = torch.where(top_logit.isfinite(), torch.inf, torch.nan)
    log_normalizer = torch.where(normal, top_logit.double() + total.log(), odd)
    kept, share, digest = head_rows(normed, ids, readout), tail.mass / total, digests(normed)
    return Sketch(ids, kept, log_normalizer, share, digest, k, logits.shape[1])


def join(parts: Sequence[Sketch]) -> Sketch:
    """Return the rows of some sketches of one head, one after another; at least one."""

    columns: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in PER_ROW
    }
    return replace(parts[0], **columns)


def _why_not_native(normed: Tensor, ids: Tensor, readout: Readout) -> str | None:  # noqa: ARG001
    return why_not_pieces(normed, readout.head) or why_not_gathered(normed.dtype)


@HEAD_ROWS.register("native", _why_not_native)
def _native(normed: Tensor, ids: Tensor, readout: Readout) -> Tensor:
    weight = cast(nn.Linear, readout.head).weight
    products = native_head_rows(normed, ids, weight)
    return readout.finish(products.to(weight.dtype))


def _why_not_aten(normed: Tensor, ids: Tensor, readout: Readout) -> str | None:  # noqa: ARG001
    head = readout.head
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        return f"the head is a {type(head).__name__}, not a plain linear layer"
    return "the head has a forward of its own" if "forward" in vars(head) else None


@HEAD_ROWS.register("aten", _why_not_aten)
def _aten(normed: Tensor, ids: Tensor, readout: Readout) -> Tensor:
    head = cast(nn.Linear, readout.head)
    rows = max(1, _GATHERED // (ids.shape[1] * normed.shape[1]))
    return torch.cat([_gathered(*part, readout, head) for part in _chunks(normed, ids, rows)])


def _gathered(normed: Tensor, ids: Tensor, readout: Readout, head: nn.Linear) -> Tensor:
    index = ids.long()
    products = torch.bmm(head.weight[index].float(), normed.float()[..., None])[..., 0]
    if head.bias is not None:
        products = products + head.bias[index].float()
    return readout.finish(products.to(head.weight.dtype))


@HEAD_ROWS.register("reference")
def _reference(normed: Tensor, ids: Tensor, readout: Readout) -> Tensor:
    """All logits, of which few are taken: the way of a head that is no plain product."""
    parts = _chunks(normed, ids, _rows_at_a_time(readout))
    return torch.cat([readout.head_logits(h).gather(1, index.long()) for h, index in parts])


def _chunks(normed: Tensor, ids: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(normed, rows), torch.split(ids, rows), strict=True)
