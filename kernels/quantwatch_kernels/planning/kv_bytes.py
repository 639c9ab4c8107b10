"""Exact bytes of a paged KV cache: 2 · layers · Σ planes, each filled up to the alignment.

A page holds `page_tokens` tokens of every KV head. Its planes are codes (tokens · heads · head_dim
· bits), scales and zero points (one each per token and head), for keys and for values. Sequences
take whole pages: the last one is partly empty, which "bits per element" alone would hide.
"""

from dataclasses import dataclass

__all__ = ["KVPages"]


@dataclass(frozen=True, slots=True)
class KVPages:
    """How a KV cache is stored. Raises ValueError for a count below 1 or bits beyond 2 … 32."""

    layers: int
    kv_heads: int
    head_dim: int
    bits: int = 16
    scale_bits: int = 0
    zero_bits: int = 0
    page_tokens: int = 16
    alignment: int = 64
    """Bytes to which each plane (codes, scales, zeros of K and of V) of a page is filled up."""

    def __post_init__(self) -> None:
        """Check the counts."""
        for name in ("layers", "kv_heads", "head_dim", "page_tokens", "alignment"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; it is {getattr(self, name)}.")
        if not 2 <= self.bits <= 32 or self.scale_bits < 0 or self.zero_bits < 0:
            raise ValueError(f"a KV element has 2 … 32 bits, scales and zeros 0 or more: {self}.")

    def page_bytes(self) -> int:
        """Bytes of one page, all layers, K and V."""
        heads = self.page_tokens * self.kv_heads
        planes = (
            heads * self.head_dim * self.bits,
            heads * self.scale_bits,
            heads * self.zero_bits,
        )
        filled = (-(-bits // (8 * self.alignment)) * self.alignment for bits in planes)
        return 2 * self.layers * sum(filled)

    def num_bytes(self, batch: int, length: int) -> int:
        """Bytes of `batch` sequences of `length` tokens: whole pages."""
        return batch * -(-length // self.page_tokens) * self.page_bytes()
