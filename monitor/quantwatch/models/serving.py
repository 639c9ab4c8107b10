"""Serve a loaded model as its configuration says."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from quantwatch.config.serving import ServeConfig
from quantwatch.errors import ModelError
from quantwatch.models.quiet import explained
from quantwatch.models.recipes import Calibrate, CalibrationInputs
from quantwatch_kernels.serve.attention_int8 import attention_named
from quantwatch_kernels.serve.int8_single_pass import attend_in_int8_
from quantwatch_kernels.serve.kv_policy import KVScheme
from quantwatch_kernels.serve.kv_scheme import scheme_named
from quantwatch_kernels.serve.kv_single_pass import (
    calibrate_gains,
    head_features,
    serve_through_,
)
from quantwatch_kernels.serve.moe_replace import serve_experts_

_TOKENS = 512


class Served(NamedTuple):
    """What is to be said of it, and how many bytes of weights it saves."""

    notes: tuple[str, ...] = ()
    saved_bytes: int = 0


def serve_inputs(
    config: ServeConfig | None, module: nn.Module, tokenizer: Any, calibrate: Calibrate | None
) -> CalibrationInputs | None:
    """Return the texts that a cache is calibrated on, None if it needs none."""
    if config is None or config.calibration is None:
        return None
    if calibrate is None:
        raise ModelError("the KV cache needs calibration texts, which nobody gave")
    with explained("calibration of the KV cache"):
        return calibrate(config.calibration, module, tokenizer)


def serve(module: nn.Module, config: ServeConfig, texts: Sequence[Tensor] | None = None) -> Served:
    """Make the module run through the paths that are named; `texts` are for calibrated gains.

    Raises ModelError for a model that can't be served so.
    """
    notes: tuple[str, ...] = ()
    saved = 0
    if config.experts is not None:
        note, saved = _experts(module, config.experts)
        notes += (note,)
    if config.kv_cache is not None:
        notes += (_cache(module, config.kv_cache, texts or ()),)
    if config.attention is not None:
        notes += (_in_int8(module, config.attention),)
    return Served(notes, saved)


def _experts(module: nn.Module, name: str) -> tuple[str, int]:
    try:
        taken = serve_experts_(module, name)
    except ValueError as error:
        raise ModelError(f"serve.experts = {name!r}: {error}") from error
    before, after = sum(each.before for each in taken), sum(each.after for each in taken)
    return f"experts {name}: {after:,} bytes instead of {before:,}", before - after


def _cache(module: nn.Module, name: str, texts: Sequence[Tensor]) -> str:
    try:
        scheme = scheme_named(name)
        gains = calibrate_gains(module, scheme, texts) if scheme.gain else None
        serve_through_(module, scheme, gains=gains)
    except ValueError as error:
        raise ModelError(f"serve.kv_cache = {name!r}: {error}") from error
    return _note(module, name, scheme)


def _note(module: Any, name: str, scheme: KVScheme) -> str:
    layers = module.config.get_text_config(decoder=True).num_hidden_layers
    bits = scheme.bits_per_element(_TOKENS, head_features(module), layers)
    host = scheme.host_bits_per_element(_TOKENS)
    elsewhere = f" and {host:.3f} in host memory" if host else ""
    return (
        f"KV cache {name}: {bits:.3f} bits per cached number{elsewhere} at {_TOKENS} tokens, "
        "attention in float32"
    )


def _in_int8(module: nn.Module, name: str) -> str:
    try:
        attend_in_int8_(module, attention_named(name))
    except ValueError as error:
        raise ModelError(f"serve.attention = {name!r}: {error}") from error
    return f"attention {name}: scores from int8 codes, each text quantized at once"
