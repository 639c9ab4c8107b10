"""How much memory a variant's weights will take, from headers alone."""

import re
from math import prod
from pathlib import Path

import torch

from quantwatch.config.schema import VariantConfig
from quantwatch.models.checkpoint import read_config, tensor_shapes, weight_files
from quantwatch.models.gguf_header import read_gguf_header
from quantwatch.models.hub import cached_folder
from quantwatch.models.quantized import OURS
from quantwatch.models.quiet import explained
from quantwatch.models.sources import resolve_source

_ITEM_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BOOL": 8}
_ITEM_BITS |= {"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8}
_STREAMED_LAYERS = 3
_CAST = frozenset({"F64", "F32", "F16", "BF16"})


def estimate_bytes(config: VariantConfig, base_dir: Path, *, streamed: bool = False) -> int | None:
    """Return the bytes of the weights once loaded in the variant's dtype, at their largest.

    A recipe quantizes after loading, so it doesn't lower the figure. None when nothing can be said
    without loading or downloading: factories, and repositories that aren't in the hub's cache.
    `streamed`: what lies outside the layers, and three layers. A GGUF file counts as a whole: the
    first time it is converted in memory.

    Raises:
        ModelError: the model doesn't exist or its headers are corrupt.
    """
    source = resolve_source(config, base_dir)
    width = torch.finfo(getattr(torch, config.loading_dtype)).bits // 8
    if source.kind == "gguf":
        return read_gguf_header(source.path).num_weights * width
    folder = source.path if source.kind == "folder" else None
    if source.kind == "hub" and source.gguf_file is None:
        folder = cached_folder(source.location, config.revision)
    if folder is None:
        return None
    with explained(f"{folder}: its headers can't be read"):
        return _streamed_bytes(folder, width) if streamed else _folder_bytes(folder, width)


def _folder_bytes(folder: Path, width: int) -> int:
    total = sum(_file_bytes(path, width) for path in weight_files(folder))
    described = read_config(folder).get("quantization_config") or {}
    method = described.get("quant_method")
    if method == OURS and described.get("execution") == "dequantized":
        # Unpacked layer by layer, so the packed ones lie beside at the start.
        unpacked: int = sum(prod(layer["shape"]) for layer in described["layers"].values())
        return total + width * unpacked
    # compressed-tensors weights are unpacked beside their scales before the first forward pass.
    return total + _unpacked_bytes(folder, width) if method == "compressed-tensors" else total


def _streamed_bytes(folder: Path, width: int) -> int:
    """Count three layers of the largest one's size; a layer's tensors have its number in them."""
    layers: dict[str, int] = {}
    for path in weight_files(folder):
        if path.suffix != ".safetensors":  # refused when it is loaded
            return _folder_bytes(folder, width)
        for name, tensor in tensor_shapes(path).items():
            found = re.search(r"(?:^|\.)(\d+)\.", name)
            place = "" if found is None else found[1]
            layers[place] = layers.get(place, 0) + _tensor_bytes(tensor, width)
    outside = layers.pop("", 0)
    return outside + _STREAMED_LAYERS * max(layers.values(), default=0)


def _tensor_bytes(tensor: tuple[str, tuple[int, ...]], width: int) -> int:
    dtype, shape = tensor
    return prod(shape) * (8 * width if dtype in _CAST else _ITEM_BITS.get(dtype, 8)) // 8


def _file_bytes(path: Path, width: int) -> int:
    if path.suffix == ".safetensors":
        return sum(_tensor_bytes(tensor, width) for tensor in tensor_shapes(path).values())
    with explained(f"{path} is truncated or corrupt"):
        tensors = torch.load(path, map_location="meta", mmap=True, weights_only=True).values()
    return sum(t.numel() * (width if t.is_floating_point() else t.itemsize) for t in tensors)


def _unpacked_bytes(folder: Path, width: int) -> int:
    """Bytes of the weights that unpacking adds: 32 ÷ bits per packed int32, or one per int8."""
    groups = read_config(folder)["quantization_config"].get("config_groups", {}).values()
    bits = [(group.get("weights") or {}).get("num_bits", 8) for group in groups]
    packed = [
        prod(shape) * _ITEM_BITS[dtype]
        for path in weight_files(folder)
        for name, (dtype, shape) in tensor_shapes(path).items()
        if dtype in ("I8", "I32") and name.endswith((".weight", ".weight_packed"))
    ]
    return sum(packed) // min(bits, default=8) * width
