"""The rows of the table of KV caches: which schemes, what they have to reach, who else did what."""

from dataclasses import dataclass, replace
from typing import Any

from quantwatch.kernel_lab.tables.model import Column
from quantwatch.kernel_lab.texts import WINDOW
from quantwatch.models.loaded import LoadedModel
from quantwatch_kernels.serve.kv_policy import KVScheme
from quantwatch_kernels.serve.kv_scheme import SCHEMES
from quantwatch_kernels.serve.kv_single_pass import head_features

COLUMNS = (
    Column("scheme", "scheme"),
    Column("windows", "measured on"),
    Column("bits", "bits per cached number", ".3f"),
    Column("host_bits", "and in host memory", ".2f"),
    Column("capacity", "capacity without window, × bf16", ".2f"),
    Column("kl", "mean KL, nats", ".5f"),
    Column("kl_se", "± se", ".5f"),
    Column("kl_p99", "p99", ".4f"),
    Column("same_top1", "same top-1", ".1%"),
    Column("ppl", "PPL", ".3f"),
    Column("peer", "llama.cpp's cache"),
    Column("peer_kl", "its mean KL", ".5f"),
    Column("reach", "to reach", ".5f"),
    Column("reached", "reached"),
    Column("kl_served", "mean KL as served", ".5f"),
    Column("kl_served_se", "± se", ".5f"),
)
COMPENSATED = (
    "int8-symmetric+top4", "int8-symmetric+gain", "int8+sinks4+window32",
    "int4-plain+r4", "int4-plain+top4", "int4-plain+gain", "int4-plain+sinks4+window32",
    "int4-hadamard+sinks4+window32", "int2-plain+gain", "int2+top4", "kivi2+top4",
)  # fmt: skip
"""Each compensation on one scheme, beside the scheme without any."""
NAMES = (*SCHEMES, *COMPENSATED)
QUICK = ("int8", "int4", "kivi2")
_PER_TOKEN_8, _AT_MOST_5, _REPAIRED_2 = 0.0001, 0.0045, 0.08
"""Mean KL to reach on 16 windows of WikiText-2's test text, SmolLM2-135M, published protocol."""


@dataclass(frozen=True, slots=True)
class KVPeer:
    """Another engine's cache and its mean KL in nats (peer_figures.md)."""

    name: str
    kl: float


PEERS = {
    "int8-centered": KVPeer("q8_0, rotated", 0.00021),
    "int4-centered": KVPeer("q4_0, rotated", 0.0395),
    "k5v4": KVPeer("q4_0, rotated", 0.0395),
}
"""Keys and values alike; half of their KL is to be reached."""


def bar(scheme: KVScheme, stored_bits: float) -> float | None:
    """Return the mean KL that a scheme is to reach, by what it is and not by how it came out.

    INT8 with a scale per token; codes of 4 bits for keys or values at no more than 5 bits a number,
    all counted; 2 bits for keys and values with any compensation. Others have none.
    """
    planes = scheme.keys, scheme.values
    if any(plane.floats for plane in planes):
        return None
    widths = sorted(plane.spec.format.bits for plane in planes)
    if widths == [8, 8]:
        return _PER_TOKEN_8 if all(plane.per == "token" for plane in planes) else None
    if widths[0] == 4:
        return _AT_MOST_5 if stored_bits <= 5 else None
    ranks = any(plane.rank for plane in planes)
    kept = scheme.sinks or scheme.window or scheme.high_layers
    repaired = ranks or kept or scheme.gain or scheme.top_pages
    return _REPAIRED_2 if widths == [2, 2] and repaired else None


def bits(loaded: LoadedModel, scheme: KVScheme, tokens: int = WINDOW) -> dict[str, float]:
    """Return bits per cached number, those in host memory, and the capacity of what is stored.

    The first two of a sequence of so many tokens: what stays in full precision counts less in a
    longer one.
    """
    features = head_features(loaded.module)
    settings: Any = loaded.module.config
    layers = settings.get_text_config(decoder=True).num_hidden_layers
    bare = replace(scheme, sinks=0, window=0, high_layers=())
    stored = bare.bits_per_element(8 * scheme.flush * WINDOW, features)
    return {
        "bits": scheme.bits_per_element(tokens, features, layers),
        "host": scheme.host_bits_per_element(tokens),
        "capacity": 16 / stored,
    }
