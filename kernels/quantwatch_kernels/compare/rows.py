"""Checks and chunking that every row-wise statistic shares."""

from collections.abc import Iterator

import torch
from torch import Tensor

from quantwatch_kernels.compare.divergence import centre, kl
from quantwatch_kernels.compare.exact import redo_exactly
from quantwatch_kernels.compare.workspace import rows_per_chunk

__all__ = ["check_pair", "chunks", "kl_rows"]


def check_pair(what: str, reference: Tensor, candidate: Tensor) -> None:
    """Raise ValueError unless both are float [n, width] of one shape, width at least 1."""
    if reference.ndim != 2 or reference.shape != candidate.shape or reference.shape[1] == 0:
        raise ValueError(
            f"{what} must both be [n, width] with width ≥ 1; "
            f"they are {list(reference.shape)} and {list(candidate.shape)}."
        )
    if not (reference.is_floating_point() and candidate.is_floating_point()):
        raise ValueError(
            f"{what} must be floats; they are {reference.dtype} and {candidate.dtype}."
        )


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors along their rows into pieces that fit the cache; one empty piece for n = 0."""
    rows = rows_per_chunk(tensors[0].shape[-1])
    for start in range(0, max(1, len(tensors[0])), rows):
        yield tuple(tensor[start : start + rows] for tensor in tensors)


def kl_rows(op: str, z_ref: Tensor, z_cand: Tensor) -> Tensor:
    """Return KL(softmax z_ref ‖ softmax z_cand), float64 [n]; fallbacks count for `op`."""
    return torch.cat([_kl_chunk(op, *chunk) for chunk in chunks(z_ref, z_cand)])


def _kl_chunk(op: str, z_ref: Tensor, z_cand: Tensor) -> Tensor:
    z_ref, z_cand = z_ref.float().contiguous(), z_cand.float().contiguous()
    result = kl(centre(z_ref, z_cand))
    for rows, exact in redo_exactly(op, z_ref, z_cand, result.isnan()):
        result[rows] = exact.kl
    return result
