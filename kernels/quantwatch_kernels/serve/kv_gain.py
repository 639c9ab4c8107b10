"""Gains that repair what rounding does to the size of cached numbers, found on calibration texts.

For each layer, key head and feature, over all codes that a text's cache would hold,

    c = Σ x·x̂ ÷ Σ x̂²

is the factor with the least Σ (x − c·x̂)². It repairs a gain error and nothing else: codes that are
too large on the average get c < 1 (coarse codes of a min-max range), at 8 bits c is 1. It is
constant, so it folds into the query (keys) or the output projection (values) and costs 16 bits per
feature once. The true numbers are needed to find it: they come from calibration texts, never from
what is measured.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantwatch_kernels.serve.kv_policy import KVScheme

__all__ = ["GainSums", "KVGains", "check_gains"]


class KVGains:
    """Gains of keys and values by layer, float16 [Hkv, 1, D] each."""

    def __init__(self, by_layer: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Raises ValueError for a gain that isn't a finite number."""
        for layer, pair in enumerate(by_layer):
            if not all(bool(torch.isfinite(gain).all()) for gain in pair):
                raise ValueError(f"layer {layer} has a gain that isn't finite.")
        self.by_layer = tuple(by_layer)

    @property
    def num_bytes(self) -> int:
        """Bytes of all gains."""
        return sum(gain.nbytes for pair in self.by_layer for gain in pair)

    def apply(self, layer: int, planes: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what is restored of keys and values [B, Hkv, n, D] times the layer's gains."""
        if layer >= len(self.by_layer):
            raise ValueError(f"there are gains of {len(self.by_layer)} layers; not of {layer}.")
        keys, values = (
            x * gain.to(x.device, x.dtype)
            for x, gain in zip(planes, self.by_layer[layer], strict=True)
        )
        return keys, values


class GainSums:
    """Σ x·x̂ and Σ x̂² in float64, layer by layer, as texts pass through."""

    def __init__(self) -> None:
        self._sums: dict[int, list[Tensor]] = {}

    def add(self, layer: int, exact: tuple[Tensor, Tensor], coded: tuple[Tensor, Tensor]) -> None:
        """Take in keys and values [B, Hkv, n, D] of one layer and what codes say of them."""
        for plane, (x, found) in enumerate(zip(exact, coded, strict=True)):
            codes = found.double()
            parts = [(x.double() * codes).sum((0, 2)), codes.square().sum((0, 2))]
            known = self._sums.get(2 * layer + plane, [torch.zeros_like(p) for p in parts])
            self._sums[2 * layer + plane] = [a + b for a, b in zip(known, parts, strict=True)]

    def gains(self, num_layers: int) -> KVGains:
        """Return the gains, 1 where nothing but zeros was seen.

        Raises ValueError when no layer was seen, or one saw a number that isn't finite.
        """
        if not self._sums:
            raise ValueError("no calibration text has passed, so there are no gains.")
        width = next(iter(self._sums.values()))[0]
        pairs = []
        for layer in range(num_layers):
            keys, values = (self._gain(2 * layer + plane, width) for plane in (0, 1))
            pairs.append((keys, values))
        return KVGains(pairs)

    def _gain(self, number: int, like: Tensor) -> Tensor:
        if number not in self._sums:  # a layer in full precision
            return torch.ones_like(like)[:, None].half()
        products, squares = self._sums[number]
        return torch.where(squares == 0, 1.0, products / squares)[:, None].half()


def check_gains(scheme: KVScheme, gains: KVGains | None) -> None:
    """Raise ValueError unless there are gains exactly where a scheme uses them."""
    if scheme.gain and gains is None:
        raise ValueError("the scheme has a gain, which must be calibrated first.")
    if gains is not None and not scheme.gain:
        raise ValueError("gains were given to a scheme that uses none.")
