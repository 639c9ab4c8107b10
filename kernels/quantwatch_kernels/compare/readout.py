"""How hidden states become logits: a model's norm, head, scale and soft-capping as a value."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn

from quantwatch_kernels.compare.workspace import workspace

__all__ = ["Readout", "check_width", "why_not_a_product", "why_not_float32", "why_not_pieces"]

_FLOAT32_BYTES = 4


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
        return self.head_logits(self.normed(h), into=into)

    def head_logits(self, normed: Tensor, *, into: str | None = None) -> Tensor:
        """Read normed hidden states [n, H] off as float32 logits [n, V].

        With `into`, the name of a workspace buffer, they may be there: valid until the name is used
        again. Touching fresh memory costs a tenth of a float32 product, a third of a bfloat16 one.
        """
        products = self._project(normed.to(self._dtype(normed)), into)[..., : self.width]
        return self.finish(products if into is None else _widened(products, into))

    def finish(self, products: Tensor) -> Tensor:
        """Turn a head's output, or some ids of it, into float32 logits: scale and soft-capping."""
        logits = products.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def finish_differences(self, products: Tensor) -> Tensor:
        """Do what `finish` does where the last n rows are differences from the first, [2n, V].

        tanh(a + b) − tanh(a) = sinh(b) ÷ (cosh(a) cosh(a + b)), which doesn't cancel.
        """
        if self.softcap is None:  # as linear as the products
            return self.finish(products)
        parts = products.float() * (self.scale / self.softcap)
        z, d = parts.chunk(2)
        apart = torch.sinh(d) / (torch.cosh(z) * torch.cosh(z + d))
        return self.softcap * torch.cat([torch.tanh(z), apart])

    def normed(self, h: Tensor) -> Tensor:
        """Return hidden states [n, H] as the head takes them."""
        normed = self.norm(h.to(self._dtype(h)))
        return normed.to(self._dtype(normed))

    def _project(self, normed: Tensor, into: str | None) -> Tensor:
        if into is None or not _is_plain(self.head, normed):
            return self.head(normed)
        weight = self.head.weight
        out = workspace.take(into, len(normed), len(weight), normed.device)
        return torch.mm(normed, weight.t(), out=out)

    def _dtype(self, h: Tensor) -> torch.dtype:
        weight = getattr(self.head, "weight", None)
        return weight.dtype if isinstance(weight, Tensor) else h.dtype


def _widened(products: Tensor, into: str) -> Tensor:
    """Return 16-bit products [n, V] on the CPU as float32 in a workspace buffer, others as is."""
    if products.device.type != "cpu" or products.element_size() >= _FLOAT32_BYTES:
        return products
    return workspace.take_like(into, products).copy_(products)


def _is_plain(head: Callable[[Tensor], Tensor], h: Tensor) -> TypeGuard[nn.Linear]:
    """Say whether a head is one float32 product on the CPU, which its module would do as well."""
    return why_not_pieces(h, head) is None and why_not_float32(head) is None


def why_not_a_product(head: Callable[[Tensor], Tensor]) -> str | None:
    """Say why a head isn't one product with a weight, None if it is."""
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        return f"the head is a {type(head).__name__}, not a plain linear layer"
    if head.bias is not None or "forward" in vars(head):
        return "the head is more than a product: it has a bias, or a forward of its own"
    return None


def why_not_float32(head: Callable[[Tensor], Tensor]) -> str | None:
    """Say why a head isn't one product with a float32 weight, None if it is."""
    if reason := why_not_a_product(head):
        return reason
    dtype = cast(nn.Linear, head).weight.dtype
    return None if dtype == torch.float32 else f"the head is {dtype}, not float32"


def why_not_pieces(h: Tensor, head: Callable[[Tensor], Tensor]) -> str | None:
    """Say why a head isn't one product that the CPU can do a few ids at a time, None if it is."""
    if reason := why_not_a_product(head):
        return reason
    for what, x in (("the head is", cast(nn.Linear, head).weight), ("hidden states are", h)):
        if x.device.type != "cpu":
            return f"{what} on {x.device}"
    return None


def check_width(normed: Tensor, weight: Tensor) -> None:
    """Raise ValueError where compiled code would read beside what it is given."""
    if normed.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden states come out of the norm {normed.shape[-1]} wide; the head takes "
            f"{weight.shape[1]}."
        )
