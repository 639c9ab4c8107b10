"""How much memory a variant's weights will take, from headers alone."""

import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

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


class Footprint(NamedTuple):
    """Bytes of the weights once loaded in the variant's dtype, at their largest."""

    resident: int
    streamed: int
    """… of what lies outside the layers, and of three layers of the largest one's size."""


def estimate_bytes(config: VariantConfig, base_dir: Path) -> Footprint | None:
    """Return what a variant's weights take, whole and streamed, in one pass over the headers.

    A recipe quantizes after loading, so it doesn't lower the figures. None when nothing can be said
    without loading or downloading: factories, and repositories that aren't in the hub's cache.
    A GGUF file counts as a whole: the first time it is converted in memory.

    Raises:
        ModelError: the model doesn't exist or its headers are corrupt.
    """
    source = resolve_source(config, base_dir)
    width = torch.finfo(getattr(torch, config.loading_dtype)).bits // 8
    if source.kind == "gguf":
        whole = read_gguf_header(source.path).num_weights * width
        return Footprint(whole, whole)
    folder = source.path if source.kind == "folder" else None
    if source.kind == "hub" and source.gguf_file is None:
        folder = cached_folder(source.location, config.revision)
    if folder is None:
        return None
    with explained(f"{folder}: its headers can't be read"):
        return _folder(folder, width)


def _folder(folder: Path, width: int) -> Footprint:
    described = read_config(folder).get("quantization_config") or {}
    method = described.get("quant_method")
    tensors = [item for path in weight_files(folder) for item in _shapes(path).items()]
    places: Counter[str] = Counter()
    for name, tensor in tensors:
        places[_place(name)] += _tensor_bytes(tensor, width)
    if method == OURS and described.get("execution") == "dequantized":
        # Unpacked layer by layer, so the packed ones lie beside at the start.
        for name, layer in described["layers"].items():
            places[_place(name)] += width * prod(layer["shape"])
    elif method == "compressed-tensors":
        # These are unpacked beside their scales before the first forward pass.
        bits = _fewest_bits(described)
        for name, tensor in tensors:
            places[_place(name)] += _packed_bits(name, tensor) // bits * width
    whole, outside = places.total(), places.pop("", 0)
    return Footprint(whole, outside + _STREAMED_LAYERS * max(places.values(), default=0))


def _place(name: str) -> str:
    """Return the number of the layer that a tensor or module is in, empty outside of them."""
    found = re.search(r"(?:^|\.)(\d+)\.", name)
    return "" if found is None else found[1]


def _tensor_bytes(tensor: tuple[str, tuple[int, ...]], width: int) -> int:
    dtype, shape = tensor
    return prod(shape) * (8 * width if dtype in _CAST else _ITEM_BITS.get(dtype, 8)) // 8


def _shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    if path.suffix == ".safetensors":
        return tensor_shapes(path)
    with explained(f"{path} is truncated or corrupt"):
        tensors = torch.load(path, map_location="meta", mmap=True, weights_only=True)
    return {
        name: ("F32" if t.is_floating_point() else f"I{8 * t.itemsize}", tuple(t.shape))
        for name, t in tensors.items()
    }


def _fewest_bits(described: dict[str, Any]) -> int:
    groups = described.get("config_groups", {}).values()
    return min(((group.get("weights") or {}).get("num_bits", 8) for group in groups), default=8)


def _packed_bits(name: str, tensor: tuple[str, tuple[int, ...]]) -> int:
    """Count the bits of a packed weight: 32 in an int32, or 8 in an int8; 0 for anything else."""
    dtype, shape = tensor
    is_packed = dtype in ("I8", "I32") and name.endswith((".weight", ".weight_packed"))
    return prod(shape) * _ITEM_BITS[dtype] if is_packed else 0
