"""Serve a loaded model as its configuration says."""

from typing import NamedTuple

from torch import nn

from quantwatch.config.serving import ServeConfig
from quantwatch.errors import ModelError
from quantwatch_kernels.serve.attention_int8 import attention_named
from quantwatch_kernels.serve.int8_single_pass import attend_in_int8_
from quantwatch_kernels.serve.kv_scheme import scheme_named
from quantwatch_kernels.serve.kv_single_pass import head_features, serve_through_
from quantwatch_kernels.serve.moe_replace import serve_experts_

_TOKENS = 512


class Served(NamedTuple):
    """What is to be said of it, and how many bytes of weights it saves."""

    notes: tuple[str, ...] = ()
    saved_bytes: int = 0


def serve(module: nn.Module, config: ServeConfig) -> Served:
    """Make the module run through the paths that are named.

    Raises ModelError for a model that can't be served so.
    """
    notes: tuple[str, ...] = ()
    saved = 0
    if config.experts is not None:
        try:
            taken = serve_experts_(module, config.experts)
        except ValueError as error:
            raise ModelError(f"serve.experts = {config.experts!r}: {error}") from error
        before, after = sum(each.before for each in taken), sum(each.after for each in taken)
        saved = before - after
        notes += (f"experts {config.experts}: {after:,} bytes instead of {before:,}",)
    if config.kv_cache is not None:
        notes += (_cache(module, config.kv_cache),)
    if config.attention is not None:
        notes += (_in_int8(module, config.attention),)
    return Served(notes, saved)


def _cache(module: nn.Module, name: str) -> str:
    scheme = scheme_named(name)
    try:
        serve_through_(module, scheme)
    except ValueError as error:
        raise ModelError(f"serve.kv_cache = {name!r}: {error}") from error
    bits = scheme.bits_per_element(_TOKENS, head_features(module))
    return (
        f"KV cache {name}: {bits:.3f} bits per cached number at {_TOKENS} tokens, "
        "attention in float32"
    )


def _in_int8(module: nn.Module, name: str) -> str:
    try:
        attend_in_int8_(module, attention_named(name))
    except ValueError as error:
        raise ModelError(f"serve.attention = {name!r}: {error}") from error
    return f"attention {name}: scores from int8 codes, each text quantized at once"
