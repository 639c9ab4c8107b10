"""What a configuration does to a model after it is loaded: quantize it, and break it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from quantwatch.config.schema import FaultConfig, RecipeConfig
from quantwatch.config.serving import ServeConfig
from quantwatch.models.anatomy import Anatomy
from quantwatch.models.faults import plant
from quantwatch.models.opening import Opened
from quantwatch.models.quantized import count_weights, stored_bytes
from quantwatch.models.quantized import settle as settle_resident
from quantwatch.models.recipes import (
    CalibrationInputs,
    apply_recipe,
    fallback_notes,
    stage_notes,
)
from quantwatch_kernels.quantize.api import Execution

Settle = Callable[[nn.Module, str, torch.dtype | None], tuple[str, ...]]
"""(module, quantization method, computing dtype) → notes."""


@dataclass(frozen=True, slots=True)
class Changes:
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
class Figures:
    """How a model is computed, and what its weights take."""

    execution: str
    size_bytes: int
    bits_per_weight: float
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    calibration_sha: str = ""


def change(opened: Opened, changes: Changes, anatomy: Anatomy, dtype: torch.dtype) -> Figures:
    """Quantize, then plant faults.

    A fault after quantization scales the dequantized weight exactly and leaves a NaN alone. Packed
    weights can't be changed afterwards: there a scale goes in before.
    """
    module, faults = opened.module, changes.faults
    if changes.recipe is None:
        figures = as_stored(opened, dtype)
        return replace(figures, notes=(*figures.notes, *plant(module, anatomy, faults)))
    packs = changes.execution != "dequantized"
    early = tuple(fault for fault in faults if packs and fault.scale is not None)
    notes = plant(module, anatomy, early)
    inputs = changes.inputs or CalibrationInputs(())
    applied = apply_recipe(module, changes.recipe, changes.execution, anatomy, inputs.ids or None)
    report = applied.report
    packed = frozenset(report.converted) - dict(report.fallbacks).keys() if packs else frozenset()
    late = tuple(fault for fault in faults if fault not in early)
    return Figures(
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


def as_stored(opened: Opened, dtype: torch.dtype, settle: Settle = settle_resident) -> Figures:
    """Describe a model without a recipe; in float32 a GGUF file is its quantized values.

    `settle` brings a quantized checkpoint into the state in which it is measured.
    """
    header = opened.gguf
    if header is not None and header.is_quantized and dtype == torch.float32:
        return Figures("dequantized", header.num_bytes, header.bits_per_weight)
    size = stored_bytes(opened.module)
    bits = 8 * size / max(count_weights(opened.module), 1)
    if opened.method is None:
        return Figures(str(dtype).removeprefix("torch."), size, bits)
    notes = settle(opened.module, opened.method, opened.dtype)
    return Figures(opened.method, size, bits, notes=notes)
