"""Per-layer KL: two hidden states read off through one fixed readout, the reference's own.

Through each model's own head a fault that is only in the head would blame layer 0.
n rows, H hidden width, V ids.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from quantwatch_kernels.compare.exact import compare_exactly
from quantwatch_kernels.compare.rows import check_pair, kl_rows
from quantwatch_kernels.compare.topk import top_k
from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.registry import Op

__all__ = ["LensStatistics", "Readout", "lens_kl", "lens_statistics"]


@dataclass(frozen=True, slots=True)
class Readout:
    """How a model turns a hidden state into logits: norm, head, scale, soft-capping, cut."""

    norm: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    scale: float = 1.0
    """Multiplies the head's output."""
    softcap: float | None = None
    """c·tanh(logits/c), after the scale."""
    width: int | None = None
    """Only the first `width` ids are kept: the shared vocabulary."""

    def logits(self, h: Tensor, *, into: str | None = None) -> Tensor:
        """Read hidden states [n, H] of any float dtype off as float32 logits [n, V]."""
        return self.head_logits(self.norm(h.to(self._dtype(h))), into=into)

    def head_logits(self, normed: Tensor, *, into: str | None = None) -> Tensor:
        """Read normed hidden states [n, H] off as float32 logits [n, V].

        With `into`, the name of a workspace buffer, a plain head writes there: the logits are valid
        until the name is used again. Touching fresh memory costs a tenth of the product.
        """
        logits = self._project(normed.to(self._dtype(normed)), into)[..., : self.width].float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def _project(self, normed: Tensor, into: str | None) -> Tensor:
        if into is None or not _is_plain(self.head):
            return self.head(normed)
        weight = self.head.weight
        out = workspace.take(into, len(normed), len(weight), normed.device)
        return torch.mm(normed, weight.t(), out=out)

    def _dtype(self, h: Tensor) -> torch.dtype:
        weight = getattr(self.head, "weight", None)
        return weight.dtype if isinstance(weight, Tensor) else h.dtype


def _is_plain(head: Callable[[Tensor], Tensor]) -> TypeGuard[nn.Linear]:
    """Say whether a head is one float32 product on the CPU, which its module would do as well."""
    return (
        type(head) is nn.Linear
        and head.bias is None
        and "forward" not in vars(head)
        and type(head.weight) is nn.Parameter
        and head.weight.dtype == torch.float32
        and head.weight.device.type == "cpu"
    )


class LensStatistics(NamedTuple):
    """Differences of the lens logits per row, float64 [n]: nats, and mean |Δ| over the top k."""

    kl: Tensor
    topk_logit_deviation_k5: Tensor
    topk_logit_deviation_k3: Tensor


LENS: Op[[Tensor, Tensor, Readout, int], LensStatistics] = Op("lens_statistics")


def lens_statistics(
    h_ref: Tensor,
    h_cand: Tensor,
    readout: Readout,
    *,
    chunk: int = 64,
) -> LensStatistics:
    """Compare hidden states [n, H] through `readout`, `chunk` rows of logits at a time.

    The head's weights are read once per chunk and model: hand in the rows of many layers at once.
    Finite rows that are equal bit for bit are 0 without being read off. Raises ValueError for
    shapes that don't fit or chunk < 1.
    """
    check_pair("hidden states", h_ref, h_cand)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1; it is {chunk}.")
    with torch.no_grad():
        return LENS.run(None, h_ref, h_cand, readout, chunk)


def lens_kl(h_ref: Tensor, h_cand: Tensor, readout: Readout) -> Tensor:
    """Return the per-layer KL of hidden states [n, H] through `readout`, nats, float64 [n]."""
    return lens_statistics(h_ref, h_cand, readout).kl


@LENS.register("aten")
def _aten(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:
    out = torch.zeros(3, len(h_ref), dtype=torch.float64, device=h_ref.device)
    equal = ((h_ref == h_cand) & torch.isfinite(h_ref)).all(-1)
    for rows in torch.split((~equal).nonzero().flatten(), chunk):
        z_ref = readout.logits(h_ref[rows], into="reference logits")
        z_cand = readout.logits(h_cand[rows], into="candidate logits")
        ids = top_k(z_ref, 5)
        kl = kl_rows(LENS.name, z_ref, z_cand)
        out[:, rows] = torch.stack([kl, *_deviations(z_ref, z_cand, ids)])
    return LensStatistics(*out)


@LENS.register("reference")
def _reference(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:  # noqa: ARG001
    z_ref, z_cand = readout.logits(h_ref), readout.logits(h_cand)
    ids = z_ref.sort(dim=-1, descending=True, stable=True)[1][:, :5]
    return LensStatistics(compare_exactly(z_ref, z_cand).kl, *_deviations(z_ref, z_cand, ids))


def _deviations(z_ref: Tensor, z_cand: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    reference, candidate = z_ref.gather(-1, ids).double(), z_cand.gather(-1, ids).double()
    gap = torch.where(reference == candidate, 0.0, (reference - candidate).abs())
    return gap.mean(-1), gap[:, :3].mean(-1)
