"""Apply a quantization recipe to a loaded model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch.config.recipe_parts import (
    ActivationsConfig,
    CalibrationConfig,
    LayerConfig,
    WeightsConfig,
)
from quantwatch.config.recipes import RecipeConfig
from quantwatch.errors import ModelError
from quantwatch.models.anatomy import Anatomy
from quantwatch.models.quiet import explained, shorten
from quantwatch.telemetry import canonical_sha
from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.api import Execution, QuantReport, quantize_
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    Granularity,
    LayerRule,
    PerChannel,
    PerGroup,
    PerTensor,
    Recipe,
    RotationSpec,
    WeightSpec,
)


@dataclass(frozen=True, slots=True)
class CalibrationInputs:
    """Token ids, int64 [1, T] per prompt, and what is to be said of their choice."""

    ids: Sequence[Tensor]
    notes: tuple[str, ...] = ()


Calibrate = Callable[[CalibrationConfig, nn.Module, Any], CalibrationInputs]
"""(calibration, model before quantization, tokenizer) → inputs; given by the pipeline."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What a recipe did, and the digest of the token ids that it was calibrated on ('' if none)."""

    report: QuantReport
    calibration_sha: str


def apply_recipe(
    module: nn.Module,
    config: RecipeConfig,
    execution: Execution,
    anatomy: Anatomy,
    inputs: Sequence[Tensor] | None = None,
) -> Applied:
    """Quantize a model in place, calibrated on `inputs` where the recipe asks for it.

    Raises ModelError when the recipe doesn't fit the model.
    """
    scopes = {path: str(scope) for path, scope in anatomy.scopes_by_path.items()}
    with explained("the recipe can't be applied"):
        recipe = kernel_recipe(config, anatomy)
        report = quantize_(module, recipe, execution=execution, scopes=scopes, calibration=inputs)
    report = scoped_report(report, scopes)
    return Applied(report, inputs_sha(inputs) if inputs else "")


def inputs_sha(inputs: Sequence[Tensor]) -> str:
    """Return the digest of the token ids that something was calibrated on."""
    return canonical_sha([prompt.tolist() for prompt in inputs])


def calibration_inputs(
    config: RecipeConfig, module: nn.Module, tokenizer: Any, calibrate: Calibrate | None
) -> CalibrationInputs | None:
    """Return the inputs that a recipe is calibrated on, None if it needs none."""
    if config.calibration is None:
        return None
    if calibrate is None:
        raise ModelError("the recipe needs calibration texts, which nobody gave")
    with explained("calibration"):
        return calibrate(config.calibration, module, tokenizer)


def scoped_report(report: QuantReport, scopes: Mapping[str, str]) -> QuantReport:
    """Name what was skipped by scope; `scopes` maps module paths to them."""
    skipped = tuple((_scoped(name, scopes), reason) for name, reason in report.skipped)
    return replace(report, skipped=skipped)


def _scoped(name: str, scopes: Mapping[str, str]) -> str:
    """Turn the path of a weight inside a tap into a scope: fused experts have none of their own."""
    inside = [path for path in scopes if name.startswith(f"{path}.")]
    path = max(inside, key=len, default=None)
    return name if path is None else f"{scopes[path]}{name[len(path) :]}"


def fallback_notes(report: QuantReport) -> tuple[str, ...]:
    """Say which layers are computed dequantized because their kernel doesn't apply, and why."""
    reasons = dict.fromkeys(reason for _, reason in report.fallbacks)
    return tuple(
        f"computed dequantized, since {reason}: "
        + shorten([scope for scope, other in report.fallbacks if other == reason])
        for reason in reasons
    )


def stage_notes(report: QuantReport) -> tuple[str, ...]:
    """Say what quantizing noted, each remark once with the places it is about."""
    remarks = dict.fromkeys(remark for _, remark in report.notes)
    return tuple(
        f"{shorten([place for place, other in report.notes if other == remark])}: {remark}"
        for remark in remarks
    )


def kernel_recipe(config: RecipeConfig, anatomy: Anatomy | None = None) -> Recipe:
    """Return a configured recipe as the kernels' value. Raises ValueError for impossible ones."""
    # "router" stands for the routing layers, whose scopes depend on the model.
    named = anatomy is not None and "router" in config.exclude
    routers = sorted(anatomy.routers) if named and anatomy is not None else []
    rotation = config.rotation
    return Recipe(
        _weights(config),
        exclude=(*config.exclude, *routers),
        layers=tuple(_rule(layer) for layer in config.layers),
        embedding=None if config.embedding is None else _weights(config.embedding),
        activations=None if config.activations is None else _activations(config.activations),
        smooth=config.smooth,
        rotation=None if rotation is None else RotationSpec(**rotation.model_dump()),
        residual_dtype=tuple(
            (rule.match, getattr(torch, rule.dtype)) for rule in config.residual_dtype
        ),
    )


def _rule(layer: LayerConfig) -> LayerRule:
    return LayerRule(layer.match, None if layer.weights is None else _weights(layer))


def _weights(config: WeightsConfig) -> WeightSpec:
    fmt = INT_FORMATS[config.weights]
    return WeightSpec(
        fmt,
        _granularity(config.granularity, config.group_size),
        "none" if fmt.symmetric else (config.zero or "integer"),
        config.clip,
        config.method,
        getattr(torch, config.scale_dtype),
        config.rounding,
        config.scales,
    )


def _activations(config: ActivationsConfig) -> ActivationSpec:
    return ActivationSpec(
        INT_FORMATS[config.format],
        _granularity(config.granularity, config.group_size),
        config.static,
        config.observer,
        config.clip_ratio,
    )


def _granularity(name: str, group_size: int | None) -> Granularity:
    if group_size is not None:
        return PerGroup(group_size)
    return PerTensor() if name == "tensor" else PerChannel()
