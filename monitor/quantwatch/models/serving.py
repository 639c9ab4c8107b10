"""Serve a loaded model as its configuration says."""

from torch import nn

from quantwatch.config.serving import ServeConfig
from quantwatch.errors import ModelError
from quantwatch_kernels.serve.attention_int8 import attention_named
from quantwatch_kernels.serve.int8_single_pass import attend_in_int8_
from quantwatch_kernels.serve.kv_scheme import scheme_named
from quantwatch_kernels.serve.kv_single_pass import head_features, serve_through_

_TOKENS = 512


def serve(module: nn.Module, config: ServeConfig) -> tuple[str, ...]:
    """Make the module run through the paths that are named; returns what is to be said of it.

    Raises ModelError for a model that can't be served so.
    """
    if config.attention is not None:
        return _in_int8(module, config.attention)
    assert config.kv_cache is not None
    scheme = scheme_named(config.kv_cache)
    try:
        serve_through_(module, scheme)
    except ValueError as error:
        raise ModelError(f"serve.kv_cache = {config.kv_cache!r}: {error}") from error
    bits = scheme.bits_per_element(_TOKENS, head_features(module))
    return (
        f"KV cache {config.kv_cache}: {bits:.3f} bits per cached number at {_TOKENS} tokens, "
        "attention in float32",
    )


def _in_int8(module: nn.Module, name: str) -> tuple[str, ...]:
    try:
        attend_in_int8_(module, attention_named(name))
    except ValueError as error:
        raise ModelError(f"serve.attention = {name!r}: {error}") from error
    return (f"attention {name}: scores from int8 codes, each text quantized at once",)
