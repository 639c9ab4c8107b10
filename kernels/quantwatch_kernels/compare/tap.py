"""Statistics of a module's output: how far the candidate's hidden state is from the reference's.

All in float64: squares of bfloat16's 1e30 don't fit in float32, and the price is 0.2 µs per row.
n rows, H hidden width. 0 ÷ 0 is 0 (equal), x ÷ 0 is ∞; a row with a NaN is NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.compare.exact import compare_exactly
from quantwatch_kernels.compare.rows import check_pair, chunks, kl_rows
from quantwatch_kernels.compare.tap_native import CANDIDATES, native_norms, why_not_passed
from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.registry import Op

__all__ = [
    "TapNorms",
    "TapStatistics",
    "feature_kl",
    "isolated_error",
    "row_norm",
    "statistics_of",
    "tap_norms",
    "tap_statistics",
]


class TapStatistics(NamedTuple):
    """Statistics per row, float64 [n]."""

    rel_error: Tensor
    """‖h − h'‖ ÷ ‖h‖."""
    sqnr_db: Tensor
    """20·log10(‖h‖ ÷ ‖h − h'‖), +∞ when equal."""
    cosine: Tensor
    """h·h' ÷ (‖h‖·‖h'‖), exactly 1 when equal, 0 when one of the two is zero."""
    max_abs: Tensor
    """max |h'|."""


class TapNorms(NamedTuple):
    """What one pass over two hidden states leaves, float64 [n]: enough for all statistics."""

    reference: Tensor
    """‖h‖, not finite exactly where h isn't."""
    difference: Tensor
    """‖h − h'‖."""
    candidate: Tensor
    """‖h'‖."""
    largest: Tensor
    """max h'."""
    smallest: Tensor
    """min h'."""


NORMS: Op[[Tensor, Tensor], TapNorms] = Op("tap_norms")
TAP: Op[[Tensor, Tensor], TapStatistics] = Op("tap_statistics")
FEATURE: Op[[Tensor, Tensor], Tensor] = Op("feature_kl")
ISOLATED: Op[[Tensor, Tensor, Tensor], Tensor] = Op("isolated_error")


def row_norm(h: Tensor) -> Tensor:
    """Return ‖h‖ of each row of [n, H], float64 [n], without overflow."""
    parts = [_norm(workspace.double("candidate", x)) for (x,) in chunks(h.detach())]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def tap_statistics(h_ref: Tensor, h_cand: Tensor) -> TapStatistics:
    """Compare hidden states [n, H] of any float dtypes.

    Raises ValueError for shapes that don't fit.
    """
    check_pair("hidden states", h_ref, h_cand)
    with torch.no_grad():
        return TAP.run(None, h_ref, h_cand)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(numerator == 0, numerator + 0 * denominator, numerator / denominator)


@TAP.register("aten")
def _tap_aten(h_ref: Tensor, h_cand: Tensor) -> TapStatistics:
    return statistics_of(tap_norms(h_ref, h_cand))


def tap_norms(h_ref: Tensor, h_cand: Tensor) -> TapNorms:
    """Return the norms of `tap_statistics` alone, for hidden states [n, H] on one device.

    Who compares a hundred taps finishes them together with `statistics_of`: a dozen operations on n
    numbers cost as much as the pass over n·H. Compiled code takes float32 on the CPU, of the
    candidate bfloat16, too.
    """
    if _why_not_taken(h_ref, h_cand):
        dtype = torch.promote_types(h_ref.dtype, torch.promote_types(h_cand.dtype, torch.float32))
        h_ref = h_ref.to(dtype)
        h_cand = h_cand if _why_not_taken(h_ref, h_cand) is None else h_cand.to(dtype)
    usual = "aten" if _why_not_taken(h_ref, h_cand) else "native"
    return NORMS.run(NORMS.preferred(usual), h_ref, h_cand)


def _why_not_taken(h_ref: Tensor, h_cand: Tensor) -> str | None:
    for h, dtypes in ((h_ref, (torch.float32,)), (h_cand, CANDIDATES)):
        if h.device.type != "cpu" or h.dtype not in dtypes:
            taken = " or ".join(map(str, dtypes))
            return f"tap.cpp takes {taken} on the CPU, not {h.dtype} on {h.device}"
    return None


def _why_not_native(h_ref: Tensor, h_cand: Tensor) -> str | None:
    return _why_not_taken(h_ref, h_cand) or why_not_passed()


@NORMS.register("native", _why_not_native)
def _norms_native(h_ref: Tensor, h_cand: Tensor) -> TapNorms:
    return TapNorms._make(native_norms(h_ref.detach(), h_cand.detach()).unbind())


@NORMS.register("aten")
def _norms_aten(h_ref: Tensor, h_cand: Tensor) -> TapNorms:
    parts = [_tap_chunk(a, b) for a, b in chunks(h_ref, h_cand)]
    columns = zip(*parts, strict=True)
    return TapNorms(*(torch.cat(column).double() for column in columns))


@NORMS.register("reference")
def _norms_reference(h_ref: Tensor, h_cand: Tensor) -> TapNorms:
    a, b = h_ref.double(), h_cand.double()
    norm, difference, norm_cand = (x.square().sum(-1).sqrt() for x in (a, a - b, b))
    return TapNorms(norm, difference, norm_cand, b.amax(-1), b.amin(-1))


def statistics_of(norms: TapNorms) -> TapStatistics:
    """Return the statistics of norms of any one shape, element by element, in that shape."""
    norm, difference, norm_cand, largest, smallest = norms
    rel_error = _ratio(difference, norm)
    both = norm * norm_cand
    # By the chord, so that nearly equal rows keep all digits of 1 − cosine.
    chord = difference.square() - (norm - norm_cand).square()
    cosine = torch.where(both == 0, 0.0, 1 - chord / (2 * both))
    cosine = torch.where(difference == 0, 1.0, cosine)
    # abs: the maximum of 0.0 and −0.0 may be −0.0, whose logarithm is no number.
    max_abs = torch.maximum(largest, -smallest).abs().double()
    return TapStatistics(rel_error, -20 * torch.log10(rel_error), cosine, max_abs)


def _tap_chunk(h_ref: Tensor, h_cand: Tensor) -> tuple[Tensor, ...]:
    candidate, reference = (
        workspace.double(name, h) for name, h in (("candidate", h_cand), ("difference", h_ref))
    )
    norms = _norm(reference), _norm(reference.sub_(candidate)), _norm(candidate)
    return *norms, h_cand.amax(-1), h_cand.amin(-1)


def _norm(rows: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norm


@TAP.register("reference")
def _tap_reference(h_ref: Tensor, h_cand: Tensor) -> TapStatistics:
    a, b = h_ref.double(), h_cand.double()
    norm, norm_cand, difference = (x.square().sum(-1).sqrt() for x in (a, b, a - b))
    rel_error = _ratio(difference, norm)
    cosine = (a * b).sum(-1) / (norm * norm_cand)
    zero = norm * norm_cand == 0
    cosine = torch.where(zero, (difference == 0).double(), cosine)
    return TapStatistics(rel_error, 20 * torch.log10(1 / rel_error), cosine, b.abs().amax(-1))


def feature_kl(h_ref: Tensor, h_cand: Tensor) -> Tensor:
    """Return KL(softmax h ‖ softmax h') over the hidden axis of [n, H], nats, float64 [n].

    The source articles' literal "KL of hidden states"; a few huge channels saturate it.
    """
    check_pair("hidden states", h_ref, h_cand)
    with torch.no_grad():
        return FEATURE.run(None, h_ref, h_cand)


@FEATURE.register("aten")
def _feature_aten(h_ref: Tensor, h_cand: Tensor) -> Tensor:
    return kl_rows(FEATURE.name, h_ref, h_cand)


@FEATURE.register("reference")
def _feature_reference(h_ref: Tensor, h_cand: Tensor) -> Tensor:
    return compare_exactly(h_ref, h_cand).kl


def isolated_error(f_ref: Tensor, f_cand: Tensor, update: Tensor) -> Tensor:
    """Return ‖f − f'‖ ÷ ‖update‖, float64 [n], of outputs [n, H] on the reference's input.

    `update` is what the module adds: output − input of a layer, the output of anything else.
    """
    check_pair("module outputs", f_ref, f_cand)
    check_pair("outputs and updates", f_ref, update)
    with torch.no_grad():
        return ISOLATED.run(None, f_ref, f_cand, update)


@ISOLATED.register("aten")
def _isolated_aten(f_ref: Tensor, f_cand: Tensor, update: Tensor) -> Tensor:
    parts = [_norm(workspace.double("difference", a).sub_(b)) for a, b in chunks(f_ref, f_cand)]
    return _ratio(torch.cat(parts), row_norm(update))


@ISOLATED.register("reference")
def _isolated_reference(f_ref: Tensor, f_cand: Tensor, update: Tensor) -> Tensor:
    difference = f_ref.double() - f_cand.double()
    norms = [x.square().sum(-1).sqrt() for x in (difference, update.double())]
    return _ratio(norms[0], norms[1])
