"""Where a model's decoder layers are, and whether token ids fit it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["check_inputs", "find_decoder_layers"]


def check_inputs(model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Raise ValueError unless there are inputs, each token ids [B, T] of the model's vocabulary."""
    if not inputs:
        raise ValueError("calibration needs at least one input of token ids; there is none.")
    embed = getattr(model, "get_input_embeddings", lambda: None)()
    limit = getattr(embed, "num_embeddings", None)
    for number, ids in enumerate(inputs):
        if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
            raise ValueError(
                f"calibration input {number} must be token ids [B, T], at least one; "
                f"it is {ids.dtype} {list(ids.shape)}."
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (limit is not None and high >= limit):
            raise ValueError(
                f"calibration input {number} has token ids {low} … {high}; "
                f"the vocabulary has 0 … {limit - 1 if limit is not None else '…'}."
            )


def find_decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of the decoder layers: the one list as long as the config says.

    Raises ValueError if there is no such list, or more than one, or a layer is in it twice.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", None)
    if count is None:
        raise ValueError(f"{type(model).__name__} has no config that says num_hidden_layers.")
    # LongCat says num_layers, and counts each as two hidden layers.
    found = _outermost_lists(model, count) or _outermost_lists(model, _num_layers(text))
    if len(found) != 1:
        names = ", ".join(path for path, _ in found)
        raise ValueError(
            f"{type(model).__name__} must have exactly one list of {count} decoder layers; "
            f"it has {names or 'none'}."
        )
    path, layers = found[0]
    modules = dict(layers._modules)  # named_children() would drop a layer that is listed twice
    if len({id(module) for module in modules.values()}) < len(modules):
        raise ValueError(f"{path} lists a layer twice; it can't be walked layer by layer.")
    return [(f"{path}.{name}", module) for name, module in modules.items() if module is not None]


def _num_layers(config: Any) -> int:
    count = getattr(config, "num_layers", None)
    return count if isinstance(count, int) else -1


def _outermost_lists(model: nn.Module, count: int) -> list[tuple[str, nn.ModuleList]]:
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    start = next((p for p, module in model.named_modules() if module is decoder), "")
    found: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.get_submodule(start).named_modules(prefix=start):
        inside = any(path.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and len(module) == count and not inside:
            found.append((path, module))
    return found
