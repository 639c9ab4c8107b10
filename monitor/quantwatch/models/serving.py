"""Serve a loaded model as its configuration says."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from quantwatch.config.serving import ServeConfig
from quantwatch.errors import ModelError
from quantwatch.models.quiet import explained
from quantwatch.models.recipes import Calibrate, CalibrationInputs
from quantwatch_kernels.serve.kv_policy import KVScheme
from quantwatch_kernels.serve.kv_scheme import scheme_named
from quantwatch_kernels.serve.kv_single_pass import (
    calibrate_gains,
    head_features,
    serve_through_,
)

_TOKENS = 512


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


def serve(
    module: nn.Module, config: ServeConfig, texts: Sequence[Tensor] | None = None
) -> tuple[str, ...]:
    """Make the module run through the paths that are named; returns what is to be said of it.

    Raises ModelError for a model that can't be served so.
    """
    try:
        scheme = scheme_named(config.kv_cache)
        gains = calibrate_gains(module, scheme, texts or ()) if scheme.gain else None
        serve_through_(module, scheme, gains=gains)
    except ValueError as error:
        raise ModelError(f"serve.kv_cache = {config.kv_cache!r}: {error}") from error
    return (_note(module, config.kv_cache, scheme),)


def _note(module: Any, name: str, scheme: KVScheme) -> str:
    layers = module.config.get_text_config(decoder=True).num_hidden_layers
    bits = scheme.bits_per_element(_TOKENS, head_features(module), layers)
    host = scheme.host_bits_per_element(_TOKENS)
    elsewhere = f" and {host:.3f} in host memory" if host else ""
    return (
        f"KV cache {name}: {bits:.3f} bits per cached number{elsewhere} at {_TOKENS} tokens, "
        "attention in float32"
    )
