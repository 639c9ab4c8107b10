"""Checkpoints that are quantized already, and how many bytes a model's weights take."""

import copy
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quantwatch.errors import ModelError

OURS = "quantwatch"
"""The method that `quantwatch_kernels.quantize.hf_quantizer` registers."""

# Method as transformers calls it → (importable package, what to install).
_PACKAGES = {
    "compressed-tensors": ("compressed_tensors", "quantwatch[compressed-tensors]"),
    "bitsandbytes": ("bitsandbytes", "quantwatch[bitsandbytes]"),
    "torchao": ("torchao", "torchao"),
    "gptq": ("gptqmodel", "gptqmodel"),
    "awq": ("gptqmodel", "gptqmodel"),
    "hqq": ("hqq", "hqq"),
    "quanto": ("optimum.quanto", "optimum-quanto"),
    "auto-round": ("auto_round", "auto-round"),
    "aqlm": ("aqlm", "aqlm"),
    "vptq": ("vptq", "vptq"),
    "eetq": ("eetq", "eetq"),
    "quark": ("quark", "amd-quark"),
}


def quantization_of(settings: Any) -> str | None:
    """Return the quantization method that a transformers configuration declares, or None."""
    text = settings.get_text_config(decoder=True)
    found = getattr(settings, "quantization_config", None) or getattr(
        text, "quantization_config", None
    )
    if found is None:
        return None
    values = found if isinstance(found, dict) else found.to_dict()
    method = values.get("quant_method")
    if method is None and (values.get("load_in_8bit") or values.get("load_in_4bit")):
        return "bitsandbytes"
    return str(getattr(method, "value", method))


def check_quantizer(location: str, method: str) -> None:
    """Check that the library behind a quantized checkpoint is there.

    Raises:
        ModelError: transformers doesn't know the method (it would load the weights as if they were
            floats), or the package is missing; the message names what to install.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    if method == OURS:
        # Registers itself with transformers.
        import quantwatch_kernels.quantize.hf_quantizer  # noqa: F401
    known = sorted({name.split("_")[0] for name in AUTO_QUANTIZATION_CONFIG_MAPPING})
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING and method not in known:
        raise ModelError(
            f"{location}: transformers doesn't know the quantization method {method!r}; "
            f"it knows {', '.join(known)}"
        )
    package, install = _PACKAGES.get(method, (None, ""))
    if package is not None and not _is_installed(package):
        raise ModelError(
            f"{location} is quantized with {method}: run `pip install '{install}'` to load it"
        )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        # The parent of a dotted name is missing.
        return False


def settle(module: nn.Module, method: str, dtype: torch.dtype | None) -> tuple[str, ...]:
    """Bring a quantized module into the state in which it is measured; return notes.

    compressed-tensors unpacks its weights at the first forward pass, which would change the module
    under the hooks: it is done here. Our own packed weights would be unpacked at every pass: it is
    done once, unless a native kernel multiplies them or the module is the caller's (`dtype` None).
    bitsandbytes logs a line per layer and forward: switched off. What a library computes in fewer
    bits than it is given is noted.
    """
    if method == OURS:
        return _settle_ours(module, dtype)
    compressor = getattr(getattr(module, "hf_quantizer", None), "compressor", None)
    if compressor is not None and hasattr(module, "ct_decompress_hook"):
        compressor.decompress_model(module)
        return ("compressed-tensors weights are unpacked in memory and computed in floats",)
    if method != "bitsandbytes":
        return ()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if getattr(module, "is_loaded_in_8bit", False):
        return ("bitsandbytes computes 8-bit layers with inputs cast to float16",)
    if any(getattr(part, "support_avx512bf16_for_cpu", False) for part in module.modules()):
        return ("bitsandbytes computes 4-bit layers in bfloat16 on this processor",)
    return ()


def _settle_ours(module: nn.Module, dtype: torch.dtype | None) -> tuple[str, ...]:
    from quantwatch_kernels.quantize.unpack import unpack_

    settings: Any = getattr(module, "config", None)
    execution = settings.quantization_config.execution
    if execution != "dequantized" or dtype is None:
        return (f"packed weights are computed by the back end {execution!r}",)
    unpack_(module, dtype)
    return ("packed weights are unpacked in memory and computed in floats",)


def leaf_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors behind a tensor (torchao's subclasses hold several)."""
    if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer):
        yield tensor.detach()
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor.detach()
        return
    for name in flatten()[0]:
        yield from leaf_tensors(getattr(tensor, name))


def stored_bytes(module: nn.Module) -> int:
    """Count the bytes of a module's state as it is in memory; shared tensors count once.

    Those without values (on meta) count as what they stand for.
    """
    sizes = {
        (leaf.device, leaf.data_ptr() or id(value), leaf.nbytes): leaf.nbytes
        for value in module.state_dict().values()
        if isinstance(value, torch.Tensor)
        for leaf in leaf_tensors(value)
    }
    return sum(sizes.values())


def count_weights(module: nn.Module) -> int:
    """Count the weights a module stands for: those of the same model without quantization."""
    settings = getattr(module, "config", None)
    if settings is None or quantization_of(settings) is None:
        return sum(parameter.numel() for parameter in module.parameters())
    plain = copy.deepcopy(settings)
    for part in {id(part): part for part in (plain, plain.get_text_config(decoder=True))}.values():
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    with torch.device("meta"):
        twin = type(module)(plain)
    return sum(parameter.numel() for parameter in twin.parameters())
