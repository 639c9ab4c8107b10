"""One weight matrix by the method its spec names, with what has to be reported about it."""

import zlib

from torch import Generator

from quantwatch_kernels.quantize.affine import QuantizedWeight, quantize, quantize_weight
from quantwatch_kernels.quantize.awq import clipped_qparams
from quantwatch_kernels.quantize.gptq import gptq
from quantwatch_kernels.quantize.hqq import hqq
from quantwatch_kernels.quantize.input_stats import InputStats
from quantwatch_kernels.quantize.mse import mse_qparams
from quantwatch_kernels.quantize.qparams import QParams
from quantwatch_kernels.quantize.selection import Layer
from quantwatch_kernels.quantize.stepped import with_steps

__all__ = ["quantize_layer"]

Notes = tuple[str, ...]


def quantize_layer(layer: Layer, stats: InputStats | None) -> tuple[QuantizedWeight, Notes]:
    """Quantize a layer's weight; `stats` are those of its inputs, for gptq and awq.

    Raises ValueError, naming the layer, where the method can't be applied.
    """
    try:
        quantized, notes = _by_method(layer, stats)
    except ValueError as error:
        raise ValueError(f"{layer.name}: {error}") from error
    qparams = quantized.qparams
    kept = qparams.scales if qparams.base is None else qparams.base
    wanted, stored = layer.spec.scale_dtype, kept.dtype
    if stored != wanted:
        what = "scales or zeros" if layer.spec.zero == "float" else "scales"
        notes = (*notes, f"{what} don't fit {wanted}: stored as {stored}")
    return quantized, notes


def _by_method(layer: Layer, stats: InputStats | None) -> tuple[QuantizedWeight, Notes]:
    spec, weight = layer.spec, layer.weight
    if spec.method == "hqq":
        return hqq(weight, spec), ()
    if not spec.calibrated:
        if spec.clip == "mse":
            return _with(layer, mse_qparams(weight, spec)), ()
        return quantize_weight(weight, spec, _generator(layer)), ()
    if stats is None:
        raise ValueError(f"{spec.method} needs calibration inputs; there are none.")
    if not stats.tokens:
        mse = spec.clip == "mse"
        quantized = (
            _with(layer, mse_qparams(weight, spec)) if mse else quantize_weight(weight, spec)
        )
        return quantized, ("no calibration token reached it: rounded to nearest",)
    notes = _few(stats, weight.shape[1])
    if spec.method == "awq":
        return _with(layer, clipped_qparams(layer, stats.hessian)), notes
    quantized, more = gptq(weight, spec, stats.hessian, stats.feedback)
    return quantized, (*notes, *more)


def _with(layer: Layer, qparams: QParams) -> QuantizedWeight:
    qparams = with_steps(layer.weight, qparams, layer.spec)
    codes = quantize(layer.weight, qparams, layer.spec, _generator(layer))
    return QuantizedWeight(codes, qparams, layer.spec)


def _generator(layer: Layer) -> Generator | None:
    """Return a generator seeded by the layer's path: no order of layers changes its bits."""
    if layer.spec.rounding != "stochastic":
        return None
    return Generator(layer.weight.device).manual_seed(zlib.crc32(layer.key.encode()))


def _few(stats: InputStats, columns: int) -> Notes:
    if stats.tokens >= columns:
        return ()
    return (f"calibrated on {stats.tokens} tokens for {columns} inputs: expect it to overfit",)
