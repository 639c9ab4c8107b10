"""Which tokens and layers of a KV cache are codes, and what repairs the codes' error.

A token's keys and values (heads H, features D each, keys after their rotary embedding) are kept in
full precision while the token is among the first `sinks` or the last `window`; what lies between is
stored as codes, `flush` tokens at a time, and never touched again (to quantize it anew at each
flush piles up errors, transformers#34189).

Compensation, one or several:

- `window`: products with the newest keys are made in 16 bits.
- `top_pages`: so are those with the pages that a query's attention chooses (`kv_top_pages`). All
  keys then exist in 16 bits too, in host memory; on the device are the pages' bounds and the pages
  that were fetched.
- `gain`: what is restored is multiplied, per head and feature, by a gain that was calibrated
  (`kv_gain`).
- a plane's `rank`: see `kv_plane`.
"""

from dataclasses import dataclass, field

from quantwatch_kernels.serve.kv_plane import PlaneScheme

__all__ = ["KVScheme"]


@dataclass(frozen=True, slots=True)
class KVScheme:
    """How both are stored, and which tokens and layers are not. Raises ValueError as it is made."""

    keys: PlaneScheme
    values: PlaneScheme
    sinks: int = 0
    """First tokens of a sequence in full precision: attention gathers there."""
    window: int = 0
    """At least so many of the newest tokens in full precision."""
    high_layers: tuple[int, ...] = field(default=())
    """Layers whose cache stays in full precision."""
    top_pages: int = 0
    """Pages whose keys a query reads in full precision in place of codes."""
    page: int = 16
    """Tokens of such a page; only whole ones are flushed then."""
    gain: bool = False

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 0:
            raise ValueError(
                f"sinks and window are numbers of tokens; not {self.sinks} and {self.window}."
            )
        if self.top_pages < 0 or self.page < 2:
            raise ValueError(
                f"top pages are 0 or more, of at least 2 tokens; not {self.top_pages} of "
                f"{self.page}."
            )
        if self.gain and self.keys.floats and self.values.floats:
            raise ValueError("16-bit floats have no gain to be repaired.")
        if self.top_pages and self.keys.floats:
            raise ValueError("keys in 16-bit floats have no pages to be read in full precision.")
        sizes = sorted({self.keys.flush, self.values.flush, self._page})
        if any(large % small for small in sizes for large in sizes if small < large):
            pages = f", pages of {self.page}" if self.top_pages else ""
            raise ValueError(
                f"keys are flushed by {self.keys.flush} tokens and values by {self.values.flush}"
                f"{pages}: one must be a multiple of the other."
            )

    @property
    def _page(self) -> int:
        return self.page if self.top_pages else 1

    @property
    def flush(self) -> int:
        """Tokens that are flushed together."""
        return max(self.keys.flush, self.values.flush, self._page)

    def stored_end(self, tokens: int) -> int:
        """Return the end of what is stored as codes, from `sinks` on, of a sequence of `tokens`."""
        between = tokens - self.sinks - self.window
        return self.sinks + max(between, 0) // self.flush * self.flush

    def bits_per_element(self, tokens: int, features: int, layers: int | None = None) -> float:
        """Return bits per cached number, full precision as 16 bits, gains and pages included.

        Of a layer that isn't high, or with `layers` on the average over all layers of a model.
        """
        stored = self.stored_end(tokens) - self.sinks if tokens > self.sinks else 0
        coded = sum(plane.num_bits(stored, features) for plane in (self.keys, self.values))
        coded += 2 * 16 * (tokens - stored) * features
        if self.top_pages:
            pages = stored // self.page
            fetched = min(self.top_pages, pages) * self.page
            coded += 16 * features * (2 * pages + fetched)
        if self.gain:
            coded += 16 * features * sum(not plane.floats for plane in (self.keys, self.values))
        bits = coded / (2 * tokens * features)
        if layers is None:
            return bits
        high = sum(layer < layers for layer in self.high_layers)
        return (16 * high + bits * (layers - high)) / layers

    def host_bits_per_element(self, tokens: int) -> float:
        """Return bits per cached number in host memory: the keys that pages are fetched from."""
        stored = self.stored_end(tokens) - self.sinks if tokens > self.sinks else 0
        return 16 * stored / (2 * tokens) if self.top_pages else 0.0
