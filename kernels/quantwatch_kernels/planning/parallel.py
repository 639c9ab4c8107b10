"""Tensor against sequence parallel for one decoder layer on p equal devices.

Tensor parallel splits heads and hidden columns and sums twice per layer: a ring all-reduce of n
bytes takes 2(p − 1) steps and sends 2(p − 1)/p · n. Sequence parallel (Ulysses) splits tokens; one
all-to-all turns the shards of Q, K and V into heads, one turns the output back: p − 1 steps each,
(p − 1)/p of a device's shard sent. Its bytes are fewer and its weights are whole on every device:
that costs memory, and in decode the time to read them. So the layer's own work counts too, as the
larger of FLOPs ÷ peak and weight bytes ÷ bandwidth, both measured. p = 1 sends nothing: 0 s.

Communication grows with tokens, width, α and β, for tensor parallel with p as well (the shards of
sequence parallel shrink as p grows). Given up: overlap of sending and computing, attention's own
FLOPs (the same in both), devices that differ.
"""

from dataclasses import dataclass
from typing import NamedTuple

from quantwatch_kernels.planning.alpha_beta import AlphaBeta, Transfer

__all__ = ["Device", "Layer", "Wire", "all_reduce_cost", "all_to_all_cost", "as_transfer",
           "sequence_parallel", "sequence_parallel_from", "tensor_parallel",
           "token_shards"]  # fmt: skip


class Wire(NamedTuple):
    """What one device does to communicate: latencies in a row, bytes sent."""

    steps: int
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer. Raises ValueError for a size below 1 or heads that groups don't divide."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    weight_bytes: float = 2.0
    """Per weight, scales counted."""
    activation_bytes: int = 2

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; it is {getattr(self, name)!r}.")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads don't share {self.kv_heads} KV heads evenly.")

    @property
    def weights(self) -> int:
        """Weights of attention and a gated MLP."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate


@dataclass(frozen=True, slots=True)
class Device:
    """Measured ceilings of one device, and the link of each collective between all of them."""

    flops_per_s: float
    bytes_per_s: float
    all_reduce: AlphaBeta
    all_to_all: AlphaBeta

    def work_s(self, flops: float, num_bytes: float) -> float:
        """Return the time of matrix products that read so many bytes of weights."""
        if not (self.flops_per_s > 0 and self.bytes_per_s > 0):
            raise ValueError(f"ceilings must be positive: {self.flops_per_s}, {self.bytes_per_s}.")
        return max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)


def token_shards(tokens: int, p: int) -> list[int]:
    """Return how many tokens each device has: as even as can be, the first ones more."""
    _positive(tokens, p)
    return [tokens // p + (rank < tokens % p) for rank in range(p)]


def all_reduce_cost(num_bytes: float, p: int) -> Wire:
    """Return what a ring all-reduce of `num_bytes` costs each of p devices."""
    return Wire(2 * (p - 1), 2 * (p - 1) / p * num_bytes)


def all_to_all_cost(num_bytes: float, p: int) -> Wire:
    """Return what an all-to-all of a shard of `num_bytes` costs each of p devices."""
    return Wire(p - 1, (p - 1) / p * num_bytes)


def as_transfer(wire: Wire, seconds: float) -> Transfer:
    """Return a measured collective as a sample to fit. Raises ValueError on one device."""
    if wire.steps < 1:
        raise ValueError("a collective of one device sends nothing; measure with two or more.")
    return Transfer(wire.num_bytes, seconds, wire.steps)


def tensor_parallel(layer: Layer, device: Device, tokens: int, p: int) -> tuple[float, float]:
    """Return seconds of (communication, work) of one layer."""
    _divides(layer, tokens, p, "kv_heads", "intermediate")
    sums = all_reduce_cost(tokens * layer.hidden * layer.activation_bytes, p)
    work = device.work_s(2 * tokens * layer.weights / p, layer.weights * layer.weight_bytes / p)
    return 2 * device.all_reduce.seconds(sums.num_bytes, sums.steps), work


def sequence_parallel(layer: Layer, device: Device, tokens: int, p: int) -> tuple[float, float]:
    """Return seconds of (communication, work) of one layer, those of the fullest shard."""
    _divides(layer, tokens, p, "kv_heads")
    shard = token_shards(tokens, p)[0]
    row = shard * layer.head_dim * layer.activation_bytes
    sends = [
        all_to_all_cost(row * heads, p) for heads in (layer.heads + 2 * layer.kv_heads, layer.heads)
    ]
    work = device.work_s(2 * shard * layer.weights, layer.weights * layer.weight_bytes)
    return sum(device.all_to_all.seconds(send.num_bytes, send.steps) for send in sends), work


def sequence_parallel_from(layer: Layer, device: Device, p: int, most: int) -> int | None:
    """Return the number of tokens from which on, up to `most`, sequence parallel is no slower.

    None if it is slower at `most` itself.
    """
    found = None
    for tokens in range(most, 0, -1):
        sequence = sum(sequence_parallel(layer, device, tokens, p))
        if sequence > sum(tensor_parallel(layer, device, tokens, p)):
            break
        found = tokens
    return found


def _positive(tokens: int, p: int) -> None:
    if tokens < 1 or p < 1:
        raise ValueError(f"tokens and devices must be at least 1: {tokens}, {p}.")


def _divides(layer: Layer, tokens: int, p: int, *names: str) -> None:
    _positive(tokens, p)
    for name in names:
        if getattr(layer, name) % p:
            raise ValueError(f"{p} devices don't divide {name} = {getattr(layer, name)}.")
