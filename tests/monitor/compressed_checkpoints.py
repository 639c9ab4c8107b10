"""Checkpoints in the layout of compressed-tensors, written by that library."""

from pathlib import Path
from typing import Any


def compressed(model: Any, folder: Path, bits: int, group: int | None) -> Path:
    """Write a compressed-tensors checkpoint with symmetric integer weights."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    kind = "pack-quantized" if bits == 4 else "int-quantized"
    weights = QuantizationArgs(
        num_bits=bits, symmetric=True, strategy="group" if group else "channel", group_size=group
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=kind)
    groups = {"all": scheme}
    apply_quantization_config(
        model, QuantizationConfig(config_groups=groups, ignore=["lm_head"], format=kind)
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.reshape(module.weight.shape[0], -1, group or module.in_features)
            scale = groups.abs().amax(-1) / (2 ** (bits - 1) - 1)
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=kind)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder
