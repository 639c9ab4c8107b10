"""Sizes that a configuration file declares, for what is told before weights are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DeclaredSizes:
    """What a decoder keeps per token, by its configuration."""

    num_layers: int
    hidden_size: int
    cache_width: int
    """Values of one layer's key and value together."""

    @property
    def cached_values(self) -> int:
        """Values of one token in a KV cache over all layers, none of which slides."""
        return self.num_layers * self.cache_width

    @property
    def recorded_values(self) -> int:
        """Values of one token's hidden states at all taps (ADR 0016)."""
        return (3 * self.num_layers + 3) * self.hidden_size


def declared_sizes(settings: Mapping[str, Any]) -> DeclaredSizes | None:
    """Return the sizes in a language model's configuration; None where it doesn't say them all."""
    layers = _first(settings, "num_hidden_layers", "n_layer")
    width = _first(settings, "hidden_size", "n_embd")
    heads = _first(settings, "num_attention_heads", "n_head")
    if layers is None or width is None or heads is None or _is_special(settings):
        return None
    size = _first(settings, "head_dim") or width // heads
    shared = _first(settings, "num_key_value_heads") or heads
    return DeclaredSizes(layers, width, 2 * size * shared)


def _is_special(settings: Mapping[str, Any]) -> bool:
    """Say whether keys and values have sizes of their own: latents, or one for all heads."""
    return "kv_lora_rank" in settings or bool(settings.get("multi_query"))


def _first(settings: Mapping[str, Any], *names: str) -> int | None:
    found = (settings.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)
