"""From a variant's configuration to a model that is ready to be measured."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantwatch.config.recipes import is_recipe_file, recipe_config
from quantwatch.config.schema import VariantConfig
from quantwatch.domain import EMBEDDING, HEAD, Fingerprint, Json, Variant
from quantwatch.errors import ModelError
from quantwatch.models import fingerprints
from quantwatch.models.anatomy import Anatomy, resolve
from quantwatch.models.changing import Changes, Figures, change
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.opening import Opened, check_device, open_module, open_source
from quantwatch.models.quantized import stored_bytes
from quantwatch.models.quiet import quiet
from quantwatch.models.recipes import (
    Calibrate,
    CalibrationInputs,
    calibration_inputs,
    inputs_sha,
)
from quantwatch.models.serving import Served, serve, serve_inputs
from quantwatch.models.shapes import context_length, device_of, real_ids
from quantwatch.models.sources import resolve_source
from quantwatch.models.streaming.changing import (
    change_streamed,
    refuse_whole_model,
    refuse_whole_serving,
)
from quantwatch.models.tokenizers import tokenizer_sha
from quantwatch.models.undisturbed import prepare


def load_variant(
    name: str,
    config: VariantConfig,
    *,
    base_dir: Path,
    cache_dir: Path,
    calibrate: Calibrate | None = None,
    streamed: bool = False,
) -> LoadedModel:
    """Load, quantize and, if so declared, break a model; relative paths start at `base_dir`.

    `calibrate` gives the texts that a recipe asks for. A `streamed` model has one decoder layer's
    values at a time and gives the same numbers.

    Raises:
        ModelError: one line naming the thing that is missing, corrupt, incomplete or impossible.
        ResourceError: memory or disk ran out.
    """
    check_device(config.device)
    source = resolve_source(config, base_dir)
    recipe = None if config.recipe is None else recipe_config(config.recipe, base_dir)
    if streamed and recipe is not None:
        refuse_whole_model(recipe, config.execution)
    if streamed and config.serve is not None:
        refuse_whole_serving(config.serve)
    with quiet():
        opened = open_source(
            source, config, base_dir=base_dir, cache_dir=cache_dir, streamed=streamed
        )
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
        changes = Changes(
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
        return _finish(name, opened, Changes(), {"kind": "module", "resolved": resolved})


def _finish(name: str, opened: Opened, changes: Changes, source: Json) -> LoadedModel:
    module = opened.module
    prepare(module)
    anatomy = _anatomy(opened)
    dtype = opened.dtype or _computing_dtype(opened, anatomy)
    figures = _changed(opened, changes, anatomy, dtype)
    texts = changes.serve_inputs or CalibrationInputs(())
    served = Served() if changes.serve is None else serve(module, changes.serve, texts.ids)
    # Experts as codes: what lies in memory now, whatever a quantized file took.
    size = stored_bytes(module) if served.saved_bytes else figures.size_bytes
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
        module, opened.tokenizer, variant, anatomy, ids, context, dtype, changes.read, opened.files
    )


def _changed(opened: Opened, changes: Changes, anatomy: Anatomy, dtype: torch.dtype) -> Figures:
    if opened.stream is None:
        return change(opened, changes, anatomy, dtype)
    opened.stream.attach(opened.module, opened.module.get_submodule(anatomy.taps[HEAD]))
    return change_streamed(opened, changes, anatomy, dtype)


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


def _fingerprint(
    opened: Opened, changes: Changes, dtype: torch.dtype, figures: Figures
) -> Fingerprint:
    device = str(device_of(opened.module))
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


def _serving(changes: Changes) -> Json | None:
    """Describe the serving for its fingerprint: what was read counts, not where it lay."""
    if changes.serve is None:
        return None
    described = changes.serve.model_dump(mode="json", exclude={"calibration"}, exclude_none=True)
    if changes.serve_inputs is None:
        return described
    return described | {"calibration": inputs_sha(changes.serve_inputs.ids)}
