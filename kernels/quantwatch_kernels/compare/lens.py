"""Per-layer KL: two hidden states read off through one fixed readout, the reference's own.

Through each model's own head a fault that is only in the head would blame layer 0.
n rows, H hidden width, V ids.
"""

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from quantwatch_kernels.compare.exact import compare_exactly
from quantwatch_kernels.compare.lens_native import PAIRS, fused_sums, why_not_native
from quantwatch_kernels.compare.lens_rounded import LENS_ROUNDED
from quantwatch_kernels.compare.lens_rows import (
    LensStatistics,
    Pair,
    deviations,
    in_pieces,
    whole_rows,
)
from quantwatch_kernels.compare.lens_words_native import PAIRS as WORD_PAIRS
from quantwatch_kernels.compare.lens_words_native import fused_word_sums, suits_cpu, why_not_words
from quantwatch_kernels.compare.readout import (
    Readout,
    why_not_a_product,
    why_not_float32,
    why_not_pieces,
)
from quantwatch_kernels.compare.rounding import Factors
from quantwatch_kernels.compare.rows import check_pair
from quantwatch_kernels.quantize.triton.available import triton_why_not
from quantwatch_kernels.registry import Op

__all__ = ["LensStatistics", "Readout", "lens_kl", "lens_statistics"]

LENS: Op[[Tensor, Tensor, Readout, int], LensStatistics] = Op("lens_statistics")


def lens_statistics(
    h_ref: Tensor,
    h_cand: Tensor,
    readout: Readout,
    *,
    chunk: int = 64,
    products: Factors = "float32",
) -> LensStatistics:
    """Compare hidden states [n, H] through `readout`, `chunk` rows of logits at a time.

    The head's weights are read once per chunk and model: hand in the rows of many layers at once.
    Finite rows that are equal bit for bit are 0 without being read off. Products of 16-bit factors
    have a stated error, see lens_rounded. Raises ValueError for shapes that don't fit, chunk < 1,
    or products of 16-bit factors with a head that has none.
    """
    check_pair("hidden states", h_ref, h_cand)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1; it is {chunk}.")
    with torch.no_grad():
        if products != "float32":
            if reason := why_not_float32(readout.head):
                raise ValueError(f"no products in {products}: {reason}.")
            op = LENS_ROUNDED[products]
            return op.run(op.preferred("native"), h_ref, h_cand, readout, chunk)
        return LENS.run(LENS.preferred(_usual(h_ref, readout)), h_ref, h_cand, readout, chunk)


def _usual(h: Tensor, readout: Readout) -> str:
    """Return the way that is wanted; where others aren't in the first place, nothing falls back."""
    if h.device.type != "cpu":
        return "aten"
    if why_not_float32(readout.head) or not suits_cpu("float32"):
        return "pieces"
    return "native"


def lens_kl(h_ref: Tensor, h_cand: Tensor, readout: Readout) -> Tensor:
    """Return the per-layer KL of hidden states [n, H] through `readout`, nats, float64 [n]."""
    return lens_statistics(h_ref, h_cand, readout).kl


def _why_not_native(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> str | None:
    head = readout.head
    return (
        why_not_float32(head)
        or _why_not_in_pieces(h_ref, h_cand, readout, chunk)
        or why_not_words("float32")
    )


@LENS.register("native", _why_not_native)
def _native(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:
    """Multiply float32 heads ourselves (`lens_words.h`), where the CPU has the instructions."""
    sums = partial(fused_word_sums, readout=readout, factors="float32")
    return in_pieces((h_ref, h_cand), readout, WORD_PAIRS, sums, _whole(readout, chunk))


def _why_not_in_pieces(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> str | None:
    del h_cand, chunk
    return why_not_pieces(h_ref, readout.head) or why_not_native()


@LENS.register("pieces", _why_not_in_pieces)
def _pieces(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:
    """Let torch multiply, piece by piece."""
    sums = partial(fused_sums, readout=readout)
    return in_pieces((h_ref, h_cand), readout, PAIRS, sums, _whole(readout, chunk))


@LENS.register("aten")
def _aten(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:
    return _whole(readout, chunk)((h_ref, h_cand))


def _whole(readout: Readout, chunk: int) -> partial[LensStatistics]:
    return partial(whole_rows, chunk=chunk, name=LENS.name, logits=partial(_logits, readout))


def _logits(readout: Readout, pair: Pair) -> Pair:
    z_ref = readout.logits(pair[0], into="reference logits")
    return z_ref, readout.logits(pair[1], into="candidate logits")


def _triton_why_not(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> str | None:
    del h_cand, chunk
    if reason := why_not_a_product(readout.head):
        return reason
    dtype = cast(nn.Linear, readout.head).weight.dtype
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the Triton kernel sums in float32, not {dtype}"
    return triton_why_not(h_ref, bfloat16=dtype == torch.bfloat16)


@LENS.register("triton", _triton_why_not)
def _triton(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:
    from quantwatch_kernels.compare.triton.lens import Finish, fused_sums_triton

    sums = partial(fused_sums_triton, finish=Finish(readout.scale, readout.softcap))
    return in_pieces((h_ref, h_cand), readout, PAIRS, sums, _whole(readout, chunk))


@LENS.register("reference")
def _reference(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:  # noqa: ARG001
    z_ref, z_cand = readout.logits(h_ref), readout.logits(h_cand)
    ids = z_ref.sort(dim=-1, descending=True, stable=True)[1][:, :5]
    return LensStatistics(compare_exactly(z_ref, z_cand).kl, *deviations(z_ref, z_cand, ids))
