"""From a variant's configuration to a model that is ready to be measured."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantwatch.config.recipes import is_recipe_file, recipe_config
from quantwatch.config.schema import FaultConfig, RecipeConfig, VariantConfig
from quantwatch.config.serving import ServeConfig
from quantwatch.domain import EMBEDDING, HEAD, Fingerprint, Json, Variant
from quantwatch.errors import ModelError
from quantwatch.models import fingerprints
from quantwatch.models.anatomy import Anatomy, resolve
from quantwatch.models.faults import plant
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.opening import Opened, check_device, open_module, open_source
from quantwatch.models.quantized import count_weights, settle, stored_bytes
from quantwatch.models.quiet import quiet
from quantwatch.models.recipes import (
    Calibrate,
    CalibrationInputs,
    apply_recipe,
    calibration_inputs,
    fallback_notes,
    inputs_sha,
    stage_notes,
)
from quantwatch.models.serving import Served, serve, serve_inputs
from quantwatch.models.shapes import context_length, real_ids
from quantwatch.models.sources import resolve_source
from quantwatch.models.tokenizers import tokenizer_sha
from quantwatch.models.undisturbed import prepare
from quantwatch_kernels.quantize.api import Execution


@dataclass(frozen=True, slots=True)
class _Changes:
    """What the configuration does to a model after it is loaded."""

    recipe: RecipeConfig | None = None
    execution: Execution = "dequantized"
    faults: tuple[FaultConfig, ...] = ()
    inputs: CalibrationInputs | None = None
    """What the recipe is calibrated on."""
    serve: ServeConfig | None = None
    serve_inputs: CalibrationInputs | None = None
    """What the serving is calibrated on."""

    @property
    def read(self) -> tuple[torch.Tensor, ...]:
        """Texts that anything was calibrated on."""
        both = (self.inputs, self.serve_inputs)
        return tuple(ids for inputs in both if inputs is not None for ids in inputs.ids)


@dataclass(frozen=True, slots=True)
class _Figures:
    """How a model is computed, and what its weights take."""

    execution: str
    size_bytes: int
    bits_per_weight: float
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    calibration_sha: str = ""


def load_variant(
    name: str,
    config: VariantConfig,
    *,
    base_dir: Path,
    cache_dir: Path,
    calibrate: Calibrate | None = None,
) -> LoadedModel:
    """Load, quantize and, if so declared, break a model; relative paths start at `base_dir`.

    `calibrate` gives the texts that a recipe asks for.

    Raises:
        ModelError: one line naming the thing that is missing, corrupt, incomplete or impossible.
        ResourceError: memory or disk ran out.
    """
    check_device(config.device)
    source = resolve_source(config, base_dir)
    recipe = None if config.recipe is None else recipe_config(config.recipe, base_dir)
    with quiet():
        opened = open_source(source, config, base_dir=base_dir, cache_dir=cache_dir)
        opened.module.requires_grad_(False)
        described = config.model_dump(
            mode="json", include=set(VariantConfig.model_fields), exclude_none=True
        )
        if recipe is None:
            del described["execution"]
        elif is_recipe_file(config.recipe):  # which may say something else tomorrow
            said = recipe.model_dump(mode="json", exclude_defaults=True)
            described["recipe_content"] = said
        described |= {"kind": source.kind, "resolved": opened.resolved}
        prepare(opened.module)
        inputs = recipe and calibration_inputs(recipe, opened.module, opened.tokenizer, calibrate)
        served = serve_inputs(config.serve, opened.module, opened.tokenizer, calibrate)
        changes = _Changes(
            recipe, config.execution, config.faults, inputs or None, config.serve, served
        )
        return _finish(name, opened, changes, described)


def from_module(name: str, module: nn.Module, tokenizer: Any | None = None) -> LoadedModel:
    """Take a module that exists already, as it is; it is put into eval mode, without a KV cache.

    Raises:
        ModelError: it is no module or holds no values, no embedding, layers or head can be found
            in it, it computes in another dtype than those allowed, or the tokenizer isn't one.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(f"{name}: a torch.nn.Module is wanted, got {module!r:.80}")
    kind = type(module)
    resolved = f"{kind.__module__}.{kind.__qualname__}"
    with quiet():
        opened = open_module(module, tokenizer, resolved)
        return _finish(name, opened, _Changes(), {"kind": "module", "resolved": resolved})


def _finish(name: str, opened: Opened, changes: _Changes, source: Json) -> LoadedModel:
    module = opened.module
    prepare(module)
    anatomy = _anatomy(opened)
    dtype = opened.dtype or _computing_dtype(opened, anatomy)
    figures = _change(opened, changes, anatomy, dtype)
    texts = changes.serve_inputs or CalibrationInputs(())
    served = Served() if changes.serve is None else serve(module, changes.serve, texts.ids)
    size = figures.size_bytes - served.saved_bytes
    ids, notes = real_ids(module, anatomy, opened.tokenizer)
    variant = Variant(
        name=name,
        fingerprint=_fingerprint(opened, changes, dtype, figures),
        execution=figures.execution,
        size_bytes=size,
        bits_per_weight=figures.bits_per_weight * size / max(figures.size_bytes, 1),
        source=source,
        notes=(*opened.notes, *figures.notes, *texts.notes, *served.notes, *notes),
        skipped=figures.skipped,
    )
    context = context_length(module)
    return LoadedModel(
        module, opened.tokenizer, variant, anatomy, ids, context, dtype, changes.read
    )


def _anatomy(opened: Opened) -> Anatomy:
    try:
        return resolve(opened.module)
    except ModelError as error:
        raise ModelError(f"{opened.resolved}: {error}") from error


def _computing_dtype(opened: Opened, anatomy: Anatomy) -> torch.dtype:
    places = (anatomy.taps[HEAD], anatomy.taps[EMBEDDING], "")
    found = (p.dtype for path in places for p in opened.module.get_submodule(path).parameters())
    dtype = next((dtype for dtype in found if dtype.is_floating_point), torch.float32)
    # Logits are compared as float32: what float64 adds would be lost unsaid.
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        raise ModelError(
            f"{opened.resolved} computes in {name}; allowed: float32, bfloat16, float16"
        )
    return dtype


def _change(opened: Opened, changes: _Changes, anatomy: Anatomy, dtype: torch.dtype) -> _Figures:
    """Quantize, then plant faults.

    A fault after quantization scales the dequantized weight exactly and leaves a NaN alone. Packed
    weights can't be changed afterwards: there a scale goes in before.
    """
    module, faults = opened.module, changes.faults
    if changes.recipe is None:
        figures = _as_stored(opened, dtype)
        return replace(figures, notes=(*figures.notes, *plant(module, anatomy, faults)))
    packs = changes.execution != "dequantized"
    early = tuple(fault for fault in faults if packs and fault.scale is not None)
    notes = plant(module, anatomy, early)
    inputs = changes.inputs or CalibrationInputs(())
    applied = apply_recipe(module, changes.recipe, changes.execution, anatomy, inputs.ids or None)
    report = applied.report
    packed = frozenset(report.converted) - dict(report.fallbacks).keys() if packs else frozenset()
    late = tuple(fault for fault in faults if fault not in early)
    return _Figures(
        changes.execution,
        report.size_bytes,
        report.bits_per_weight,
        report.skipped,
        (
            *(*inputs.notes, *notes, *stage_notes(report), *fallback_notes(report)),
            *plant(module, anatomy, late, packed),
        ),
        applied.calibration_sha,
    )


def _as_stored(opened: Opened, dtype: torch.dtype) -> _Figures:
    """Describe a model without a recipe; in float32 a GGUF file is its quantized values."""
    header = opened.gguf
    if header is not None and header.is_quantized and dtype == torch.float32:
        return _Figures("dequantized", header.num_bytes, header.bits_per_weight)
    size = stored_bytes(opened.module)
    bits = 8 * size / max(count_weights(opened.module), 1)
    if opened.method is None:
        return _Figures(str(dtype).removeprefix("torch."), size, bits)
    notes = settle(opened.module, opened.method, opened.dtype)
    return _Figures(opened.method, size, bits, notes=notes)


def _fingerprint(
    opened: Opened, changes: _Changes, dtype: torch.dtype, figures: _Figures
) -> Fingerprint:
    device = str(next(opened.module.parameters()).device)
    return Fingerprint(
        weights_sha=opened.weights_sha,
        config_sha=opened.config_sha,
        tokenizer_sha=tokenizer_sha(opened.tokenizer),
        recipe_sha=fingerprints.recipe_sha(changes.recipe, figures.calibration_sha),
        serve_sha=fingerprints.serve_sha(
            opened.module, dtype, device, figures.execution, _serving(changes)
        ),
        fault_sha=fingerprints.fault_sha(changes.faults),
    )


def _serving(changes: _Changes) -> Json | None:
    """Describe the serving for its fingerprint: what was read counts, not where it lay."""
    if changes.serve is None:
        return None
    described = changes.serve.model_dump(mode="json", exclude={"calibration"}, exclude_none=True)
    if changes.serve_inputs is None:
        return described
    return described | {"calibration": inputs_sha(changes.serve_inputs.ids)}
