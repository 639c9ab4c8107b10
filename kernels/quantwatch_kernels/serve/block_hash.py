"""The name of a full block's content: a chained hash over everything its keys and values depend on.

    digest(block) = SHA-256( domain ‖ digest(parent) ‖ extra keys ‖ number of tokens ‖ tokens )

The keys and values of a token depend on all tokens before it, so the parent's digest is part of the
name; and on what isn't text: the adapter (LoRA), the scheme the cache is quantized with, images. A
salt keeps tenants apart. Each of these is written with its name, its type and its length: without
them `lora="1"` and `salt="1"`, or ("ab", "c") and ("a", "bc"), would share a name. Tokens take
eight bytes each; one byte would make 1 and 257 the same (kernel_anchors.md §4, row 34).

A digest only finds; the prefix cache compares what it found (`prefix_cache.py`).
"""

import hashlib
from collections.abc import Callable, Sequence

__all__ = ["BlockHash", "ExtraKeys", "block_digest", "extra_keys", "token_ids"]

ExtraKeys = tuple[tuple[str, str | int | bytes], ...]
"""Named values, sorted by name: what content depends on besides its tokens."""

BlockHash = Callable[[bytes | None, tuple[int, ...], ExtraKeys], bytes]
"""digest(parent's digest or None, tokens, extra keys)"""

_DOMAIN = b"quantwatch.kv-block.1"
_ROOT = bytes(32)
_LARGEST = 2**63


def extra_keys(**named: str | int | bytes | None) -> ExtraKeys:
    """Return named values as extra keys (lora=…, salt=…, scheme=…); None leaves a name out.

    Raises ValueError for any other type: True, 1 and 1.0 are equal in Python and mean no key.
    """
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, str | int | bytes | None):
            raise ValueError(f"extra key {name!r} is {value!r}; a str, an int or bytes is allowed.")
    return tuple(sorted((name, value) for name, value in named.items() if value is not None))


def token_ids(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return token ids as plain integers. Raises ValueError for one outside 0 … 2⁶³ − 1."""
    ids = tuple(int(token) for token in tokens)
    for position, token in enumerate(ids):
        if not 0 <= token < _LARGEST:
            raise ValueError(f"token {position} is {token}; ids lie in 0 … 2^63 - 1.")
    return ids


def block_digest(parent: bytes | None, tokens: tuple[int, ...], extra: ExtraKeys) -> bytes:
    """Return the 32 bytes that name a block's content; `parent` is None for a first block."""
    digest = hashlib.sha256(_DOMAIN)
    digest.update(b"\0" + _ROOT if parent is None else b"\1" + parent)
    digest.update(len(extra).to_bytes(4, "little"))
    for name, value in extra:
        digest.update(_field(name) + _field(value))
    digest.update(len(tokens).to_bytes(4, "little"))
    digest.update(b"".join(token.to_bytes(8, "little") for token in tokens))
    return digest.digest()


def _field(value: str | int | bytes) -> bytes:
    """Return a type, a length and the value: no two fields, nor two rows of them, are the same."""
    if isinstance(value, str):
        kind, raw = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, int):
        kind, raw = b"i", str(value).encode()
    else:
        kind, raw = b"b", value
    return kind + len(raw).to_bytes(8, "little") + raw
