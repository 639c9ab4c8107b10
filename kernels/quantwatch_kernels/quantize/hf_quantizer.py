"""The recipe as a quantizer of transformers: `from_pretrained(…, quantization_config=…)`.

Importing this module registers the method "quantwatch". A float checkpoint is loaded first and
packed afterwards with `quantize_`, so that both ways give the same bits (given up: the peak of
memory is the float model's). A packed checkpoint gets its layers replaced by empty packed ones
before its tensors arrive; nothing is unpacked on the way. Layers are named by module path here
("head" is the output embedding), which is what the globs of a recipe match.

Methods that need activations (GPTQ, AWQ, static scales) have no data inside `from_pretrained`:
quantize with `quantize_` and write the folder with `save_quantized`; it loads the same way.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantwatch_kernels.quantize.api import Execution, QuantReport, quantize_
from quantwatch_kernels.quantize.basis import mark_from_json_
from quantwatch_kernels.quantize.checkpoint import (
    Layout,
    describe,
    install_empty,
    set_backend,
)
from quantwatch_kernels.quantize.high_precision import (
    keep_routers_high_,
    keep_statistics_high_,
)
from quantwatch_kernels.quantize.packed_embedding import TiedHead
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.quantize.recipe_json import recipe_from_json
from quantwatch_kernels.quantize.saved import save_whole
from quantwatch_kernels.quantize.stored_tensors import check_stored
from quantwatch_kernels.quantize.unmatched import module_names, own_globs

__all__ = ["METHOD", "QuantwatchConfig", "QuantwatchQuantizer", "save_quantized"]

METHOD = "quantwatch"
_VERSION = 1


@register_quantization_config(METHOD)
class QuantwatchConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """A recipe to quantize with while loading, or the description of a packed checkpoint."""

    def __init__(
        self,
        recipe: Recipe | Mapping[str, object] | str | None = None,
        execution: Execution = "dequantized",
        modules_to_not_convert: list[str] | None = None,
        **stored: Any,
    ) -> None:
        """Take a recipe (a value, its JSON, or a plain one's name) and how to compute with it.

        `modules_to_not_convert` are paths of modules, or their last components, that stay as they
        are. `stored` holds what a checkpoint says about itself. Raises ValueError for anything that
        isn't understood.
        """
        self.quant_method = METHOD
        self.recipe = _recipe(recipe)
        if execution not in get_args(Execution):
            allowed = ", ".join(get_args(Execution))
            raise ValueError(f"execution is {execution!r}; allowed: {allowed}.")
        self.execution = execution
        self.modules_to_not_convert = module_names(modules_to_not_convert)
        self.layout = _layout(stored)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that goes into config.json."""
        values: dict[str, Any] = {"quant_method": METHOD, "execution": self.execution}
        if self.recipe is not None:
            values["recipe"] = self.recipe.to_json()
        if self.modules_to_not_convert is not None:
            values["modules_to_not_convert"] = list(self.modules_to_not_convert)
        if self.layout is not None:
            values["format_version"] = _VERSION
            values |= self.layout.to_json()
        return values


def _recipe(recipe: Recipe | Mapping[str, object] | str | None) -> Recipe | None:
    if recipe is None or isinstance(recipe, Recipe):
        return recipe
    return Recipe.named(recipe) if isinstance(recipe, str) else recipe_from_json(recipe)


def _layout(stored: Mapping[str, Any]) -> Layout | None:
    known = {"quant_method", "format_version", "layers", "tied", "other_basis"}
    if unknown := sorted(stored.keys() - known):
        raise ValueError(
            f"{METHOD} has no setting {unknown[0]!r} (= {stored[unknown[0]]!r:.80}); allowed: "
            "recipe, execution, modules_to_not_convert, and in a checkpoint "
            f"{', '.join(sorted(known))}."
        )
    if stored.get("quant_method", METHOD) != METHOD:
        raise ValueError(f"quant_method is {stored['quant_method']!r}; allowed: {METHOD!r}.")
    if "layers" not in stored:
        if more := sorted(stored.keys() - {"quant_method"}):
            why = "the checkpoint doesn't describe its packed layers"
            raise ValueError(f"{more[0]} is given without layers: {why}.")
        return None
    if type(stored.get("format_version")) is not int or stored["format_version"] != _VERSION:
        raise ValueError(
            f"format_version is {stored.get('format_version')!r}; allowed: {_VERSION}."
        )
    return Layout.from_json(stored)


@register_quantizer(METHOD)
class QuantwatchQuantizer(HfQuantizer):  # type: ignore[misc]
    """Packs a float model after it is loaded, or makes room for a packed one before."""

    requires_calibration = False
    quantization_config: QuantwatchConfig
    report: QuantReport | None = None
    """What was converted while loading and why the rest wasn't; None for a packed checkpoint."""

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise ValueError for what can't be loaded as asked, before anything is read."""
        del args, kwargs
        devices = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
        if "disk" in devices or len(devices) > 1 or device_map in ("auto", "balanced"):
            raise ValueError(
                f"{METHOD} loads a model onto one device; device_map is {device_map!r:.120}, "
                "allowed: one device for all modules, not disk."
            )
        config = self.quantization_config
        if self.pre_quantized:
            if config.layout is None:
                raise ValueError(f"this {METHOD} checkpoint doesn't describe its packed layers.")
            return
        if config.recipe is None:
            raise ValueError(f"{METHOD} needs a recipe to quantize a float checkpoint with.")
        if reason := _why_not_on_load(config.recipe):
            raise ValueError(
                f"recipe {config.recipe.name} can't be applied while loading: {reason}; use "
                "quantize_ and, for weights alone, save_quantized."
            )

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        if self.pre_quantized:
            layout = self.quantization_config.layout
            assert layout is not None
            install_empty(model, layout, self.quantization_config.execution)
            check_stored(kwargs.get("checkpoint_files") or (), layout)
            # Before weights arrive: they are read in the dtype of what they are read into.
            keep_routers_high_(model)
            # Some models initialize `module.c_proj.weight` by name and skip what has this mark.
            done = torch.empty(0)
            done._is_hf_initialized = True  # type: ignore[attr-defined]
            for module in _packed(model):
                vars(module)["weight"] = done

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        del kwargs
        config = self.quantization_config
        if self.pre_quantized:
            for module in _packed(model):
                del vars(module)["weight"]
            # `quantize_` does this to a float model; it isn't part of a state dict.
            keep_statistics_high_(model)
            assert config.layout is not None
            mark_from_json_(model, config.layout.other_basis)
        else:
            assert config.recipe is not None
            recipe = _without(model, config.recipe, config.modules_to_not_convert or [])
            # "reference" packs every layer; which back end then computes is a matter of its own.
            self.report = quantize_(model, recipe, execution="reference")
            set_backend(model, config.execution)
            config.layout = describe(model)

    def is_serializable(self) -> bool:
        """A packed model is its state dict and the configuration."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Codes have no gradient."""
        return False


def _packed(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, PackedLinear | TiedHead)]


def _why_not_on_load(recipe: Recipe) -> str | None:
    if recipe.calibrated:
        return "it needs calibration inputs, which from_pretrained doesn't have"
    parts = {
        "activations": recipe.activations,
        "rotation": recipe.rotation,
        "residual_dtype": recipe.residual_dtype or None,
    }
    more = [name for name, value in parts.items() if value is not None]
    return f"a checkpoint holds weights and would lose its {', '.join(more)}" if more else None


def _without(model: nn.Module, recipe: Recipe, names: list[str]) -> Recipe:
    """Exclude modules by path or last component, with all they contain; each must exist."""
    paths = dict(model.named_modules())
    excluded = list(recipe.exclude)
    embedding = recipe.embedding
    for name in names:
        roots = [path for path in paths if path == name or path.endswith(f".{name}")]
        if not roots:
            raise ValueError(f"modules_to_not_convert: the model has no module {name!r}.")
        inside = [p for p in paths if any(p == r or p.startswith(f"{r}.") for r in roots)]
        excluded += [glob for path in inside for glob in own_globs(path, paths[path])]
        if any(isinstance(paths[path], nn.Embedding) for path in inside):
            embedding = None
    return replace(recipe, exclude=tuple(excluded), embedding=embedding)


def save_quantized(
    model: nn.Module, folder: Path | str, *, recipe: Recipe | None = None, **settings: Any
) -> None:
    """Write a transformers model that `quantize_` packed, as `from_pretrained` reads it.

    `recipe` is noted in the folder; `settings` go to `save_pretrained` (max_shard_size, …). The
    model is left as it was. Layers that were quantized but not packed (execution "dequantized", or
    "aten" where the native kernel doesn't apply) are stored in floats: "reference" packs them all.
    Raises ValueError when nothing is packed, or when weights alone don't make up the model.
    """
    layout = describe(model)
    # Without a back end's name a layer runs on its operator's first one, the native kernel.
    backends = {m.backend or "aten" for m in model.modules() if isinstance(m, PackedLinear)}
    execution: Any = "aten" if "aten" in backends else min(backends)
    config = QuantwatchConfig(recipe, execution)
    config.layout = layout
    had = {name: vars(model)[name] for name in ("hf_quantizer",) if name in vars(model)}
    settings_before = getattr(model.config, "quantization_config", None)
    model.hf_quantizer = QuantwatchQuantizer(config, pre_quantized=True)
    model.config.quantization_config = config  # type: ignore[union-attr]
    try:
        save_whole(model, folder, **settings)
    finally:
        del model.hf_quantizer
        vars(model).update(had)
        if settings_before is None:
            del model.config.quantization_config  # type: ignore[union-attr]
        else:
            model.config.quantization_config = settings_before  # type: ignore[union-attr]
