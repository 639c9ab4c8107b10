"""Bring the layers of a quantized checkpoint into the state in which they are measured."""

from functools import partial
from typing import Any

import torch
from torch import nn

from quantwatch.models.quantized import OURS, settle
from quantwatch.models.streaming.stream import LayerStream
from quantwatch_kernels.quantize.high_precision import keep_norms_high_
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.unpack import float_twin, unpacked_weight


def settle_streamed(
    stream: LayerStream, module: nn.Module, method: str, dtype: torch.dtype | None
) -> tuple[str, ...]:
    """Do what `settle` does outside the layers, and have the stream do it inside; return notes."""
    if method == OURS:
        stream.changes.append(partial(_keep_high, stream))
        settings: Any = module.config
        if settings.quantization_config.execution == "dequantized" and dtype is not None:
            _unpack_layers(stream, module, dtype)
        return settle(module, method, dtype)
    compressor = getattr(getattr(module, "hf_quantizer", None), "compressor", None)
    if compressor is None or not hasattr(module, "ct_decompress_hook"):
        return ()
    for path, part in list(module.named_modules()):
        if stream.index_of(path) is None:
            _decompress(part, compressor)
    compressor.remove_decompression_hook(module)
    stream.changes.append(partial(_decompress_layer, stream, compressor))
    return ("compressed-tensors weights are unpacked in memory and computed in floats",)


def high_statistics(stream: LayerStream, index: int) -> list[tuple[str, str]]:
    """Compute a layer's norm statistics in float32; return (path, what was changed).

    A layer whose norms do so already stays, so it may be called whenever the layer was read.
    """
    path = stream.paths[index]
    return keep_norms_high_(stream.layers[path], f"{path}.")


def _keep_high(stream: LayerStream, index: int) -> None:
    high_statistics(stream, index)


def _unpack_layers(stream: LayerStream, module: nn.Module, dtype: torch.dtype) -> None:
    for path, part in list(module.named_modules()):
        index = stream.index_of(path)
        if index is not None and isinstance(part, PackedLinear):
            twin = float_twin(part, dtype)
            module.set_submodule(path, twin)
            stream.packed[path] = part
            stream.changes.append(partial(_unpack, index, (part, twin), dtype))


def _unpack(
    wanted: int, pair: tuple[PackedLinear, nn.Linear], dtype: torch.dtype, index: int
) -> None:
    packed, twin = pair
    if index != wanted:
        return
    twin._parameters["weight"] = unpacked_weight(packed, dtype)
    twin._parameters["bias"] = packed._parameters.get("bias")
    # The codes were only needed for that.
    for name, buffer in packed._buffers.items():
        packed._buffers[name] = None if buffer is None else torch.empty_like(buffer, device="meta")


def _decompress_layer(stream: LayerStream, compressor: Any, index: int) -> None:
    for part in stream.layers[stream.paths[index]].modules():
        _decompress(part, compressor)


def _decompress(part: nn.Module, compressor: Any) -> None:
    from compressed_tensors.compressors.base import decompress_module
    from compressed_tensors.quantization.utils.helpers import is_module_quantized

    if is_module_quantized(part):
        decompress_module(part, compressor.force_compression_format)
