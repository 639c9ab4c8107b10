"""Export as a compressed-tensors checkpoint ("pack-quantized"), what vLLM and transformers read.

Per layer [N, K] with b bits and G groups per row: `weight_packed` int32 [N, ⌈K·b/32⌉], the codes
as unsigned numbers c + 2^(b−1), lowest bits first; `weight_scale` [N, G]; `weight_zero_point` int32
[⌈N·b/32⌉, G] for asymmetric weights, packed down the rows the same way; `weight_shape` int64 [2].
The layout's symmetric codes are −2^(b−1) … 2^(b−1) − 1; ours, −7 … 7 at 4 bits, are some of them,
and since w = code · scale the scale's convention (absmax/7 here, absmax/7.5 there) doesn't matter.
Our asymmetric codes and zeros 0 … 2^b − 1 are stored as they are: less 2^(b−1), then plus it.

Why 4 and 8 bits only: at these the words of all versions of the package agree and vLLM has kernels.
Other widths are packed densely since some version of the package and with gaps before, and nothing
in a checkpoint says which: a reader of the other kind would compute with garbage.

Asymmetric checkpoints say `dequantize`: transformers 5.24 with compressed-tensors 0.20 makes room
for unpacked zeros only and can't load packed ones any other way (its own neither).

Rotations folded into the weights, smoothing and AWQ change no logits, but the hidden states: what
`basis` knows of that stands in config.json as `quantwatch_other_basis`, for `mark_loaded_`. The
layout's own `transform_config` says which transforms a reader is to apply; these are applied
already. Rotations done online, quantized activations and a rounded residual stream are refused.

Scales are stored in the dtype they have; readers cast them to the model's dtype, so values survive
exactly in float32 only (and in 16 bits if the scales fit that dtype).
"""

import copy
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.basis import mark_from_json_
from quantwatch_kernels.quantize.checkpoint import describe
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.packing import pack
from quantwatch_kernels.quantize.recipe import PerGroup, WeightSpec
from quantwatch_kernels.quantize.saved import save_whole

__all__ = ["export_compressed_tensors", "mark_loaded_", "pack_int32", "to_compressed"]

_BITS = (4, 8)
_BASIS = "quantwatch_other_basis"


def pack_int32(unsigned: Tensor, bits: int) -> Tensor:
    """Pack codes 0 … 2^bits − 1 [N, K] into int32 [N, ⌈K·bits/32⌉], lowest bits first.

    Raises ValueError for a code out of range.
    """
    assert sys.byteorder == "little", "words are viewed as bytes"
    packed = pack(unsigned.to(torch.uint8), INT_FORMATS[f"uint{bits}"])
    packed = torch.nn.functional.pad(packed, (0, -packed.shape[1] % 4))
    # Not contiguous(): a single row passes for that with any stride.
    return packed.clone(memory_format=torch.contiguous_format).view(torch.int32)


def to_compressed(weight: QuantizedWeight, layer: str) -> dict[str, Tensor]:
    """Return the tensors of one layer, by their names within it.

    Raises ValueError naming the layer for what the layout can't express.
    """
    check_expressible(weight.spec, weight.codes.shape[1], layer)
    bits = weight.spec.format.bits
    half = 1 << (bits - 1)
    shift = half if weight.spec.format.symmetric else 0
    scales = weight.qparams.scales
    zeros = weight.qparams.zeros
    if not isinstance(weight.spec.granularity, PerGroup):
        # One scale per row: a scale of the whole matrix is there in every row already.
        scales, zeros = scales[:, :1], None if zeros is None else zeros[:, :1]
    tensors = {
        "weight_packed": pack_int32(weight.codes.to(torch.int16) + shift, bits),
        "weight_scale": scales.contiguous(),
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if zeros is not None:
        tensors["weight_zero_point"] = pack_int32(zeros.T, bits).T.contiguous()
    return tensors


def check_expressible(spec: WeightSpec, columns: int, layer: str) -> None:
    """Raise ValueError naming the layer, what it has and what the layout allows."""
    if spec.format.bits not in _BITS:
        raise ValueError(
            f"{layer} has {spec.format.bits}-bit weights ({spec.format.name}); "
            "a compressed-tensors checkpoint that every reader unpacks alike has 4 or 8 bits."
        )
    if spec.zero == "float":
        raise ValueError(
            f"{layer} has float zero points; compressed-tensors allows none, or whole codes."
        )
    size = spec.granularity.group_size(columns)
    if columns % size:
        raise ValueError(
            f"{layer} has groups of {size} in rows of {columns}, the last one short; "
            "compressed-tensors allows groups that divide the row, or one per row."
        )


def export_compressed_tensors(model: Any, folder: Path | str, **settings: Any) -> None:
    """Write a transformers model that `quantize_` packed as a compressed-tensors checkpoint.

    `settings` go to `save_pretrained` (max_shard_size, …); the model is left as it was. Raises
    ValueError naming a layer that the layout can't express: a width, a float zero, a short group,
    an embedding, a Conv1D, or anything computed beside the product with its weight.
    """
    layout = describe(model)
    tensors: dict[str, Tensor] = {}
    groups: dict[WeightSpec, list[str]] = defaultdict(list)
    for path, module in model.named_modules():
        if path in layout.layers:
            _check_linear(model, path, module)
            packed = to_compressed(module.quantized(), path)
            tensors |= {f"{path}.{name}": tensor for name, tensor in packed.items()}
            groups[module.spec].append(path)
    ours = [f"{path}.{name}" for path in layout.layers for name in ("weight_packed", "scales")]
    ours += [f"{path}.zeros" for path in layout.layers]
    floats = {name: t for name, t in model.state_dict().items() if name not in ours}
    kept = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    added: dict[str, Any] = {"quantization_config": _description(groups, kept)}
    if layout.other_basis:
        added[_BASIS] = layout.other_basis
    _save(model, folder, floats | tensors, added, settings)


def mark_loaded_(model: Any) -> None:
    """Mark the modules of a loaded export that take or give other hidden states than before.

    Does nothing for a model whose config says nothing of it. Raises ValueError for a description
    that isn't understood.
    """
    values = getattr(model.config, _BASIS, None)
    if values is None:
        return
    if not isinstance(values, Mapping):
        raise ValueError(f"{_BASIS} is {values!r:.80}; allowed: a JSON object.")
    mark_from_json_(model, values)


def _check_linear(model: Any, path: str, module: nn.Module) -> None:
    if type(module) is not PackedLinear:
        raise ValueError(
            f"{path} is an embedding; readers of compressed-tensors take packed linear layers. "
            "Quantize without a format for the embedding, or use save_quantized."
        )
    with torch.device("meta"):
        original = type(model)(model.config).get_submodule(path)
    if not isinstance(original, nn.Linear):
        kind = type(original).__name__
        raise ValueError(f"{path} is a {kind} in this architecture; allowed: Linear.")


def _save(
    model: Any, folder: Path | str, tensors: dict[str, Tensor], added: Any, settings: Any
) -> None:
    before = model.config
    model.config = copy.deepcopy(before)
    model.config.update(added)
    try:
        save_whole(model, folder, state_dict=tensors, **settings)
    finally:
        model.config = before


def _description(groups: dict[WeightSpec, list[str]], kept: list[str]) -> dict[str, Any]:
    """Return quantization_config as readers want it: one group per spec, its layers by name."""
    every = len(groups) == 1
    packed_zeros = any(not spec.format.symmetric for spec in groups)
    return {
        **({"dequantize": True} if packed_zeros else {}),
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                # A class name where it says the same, since readers match it fastest.
                "targets": ["Linear"] if every else paths,
                "weights": _arguments(spec),
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
            for index, (spec, paths) in enumerate(groups.items())
        },
        "ignore": kept,
        "kv_cache_scheme": None,
    }


def _arguments(spec: WeightSpec) -> dict[str, Any]:
    grouped = isinstance(spec.granularity, PerGroup)
    return {
        "num_bits": spec.format.bits,
        "type": "int",
        "symmetric": spec.format.symmetric,
        "strategy": "group" if grouped else "channel",
        "group_size": spec.granularity.group_size(0) if grouped else None,
        "dynamic": False,
    }
