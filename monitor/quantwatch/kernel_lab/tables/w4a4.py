"""Weights and activations in low bits: what rounding the activations costs, and what helps.

One row per recipe, from int8 with one scale for the whole input to 4 bits on both sides. Weights of
8 bits have a scale per channel, those of 4 bits one per group; activations are asymmetric, their
scale per tensor (from calibration, or from each input as it comes), per token, or per token and
group of inputs. Three things help: smoothing moves outlier channels into the weights, a Hadamard
rotation spreads them over all channels (R1: the residual stream, R2: each head's values, R4: the
down projection's input), in blocks only over their own group, and GPTQ makes up for what rounding
the weights costs. GPTQ runs after the rotation, on unrounded activations.

Head and embedding stay in float32 and so does what enters the head. Bits per weight are given for
the quantized layers, as stored, and for the whole model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantwatch.kernel_lab.measure import Figures, Yardstick
from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables.model import Cell, Column, Rows, Table, TableRequest
from quantwatch.kernel_lab.tables.peers import is_peers, not_peers_note
from quantwatch.kernel_lab.texts import calibration_text
from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.api import QuantReport, model_size
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    Granularity,
    PerChannel,
    PerGroup,
    PerTensor,
    Recipe,
    RotationSpec,
)
from quantwatch_kernels.quantize.selection import scope_names, select

_WINDOWS = 8
"""Later windows of a text that a recipe is calibrated on: 4,096 tokens."""
_W8, _W4 = Recipe.named("int8-channel"), Recipe.named("uint4-g64")
_TOKEN = PerChannel()
_ALL = RotationSpec(residual=True, values=True, down=True)
_SMOOTH = 0.5
_W8A8_BAR, _W4A4_BAR = 0.02, 0.35
_COLUMNS = (
    Column("recipe", "recipe"),
    Column("weights", "weights"),
    Column("activations", "activations"),
    Column("helped", "helped by"),
    Column("layer_bits", "bits per weight of the layers", ".3f"),
    Column("bits_per_weight", "of all", ".3f"),
    Column("kl", "mean KL, nats", ".5f"),
    Column("kl_se", "± se", ".5f"),
    Column("same_top1", "same top-1", ".1%"),
    Column("ppl", "PPL", ".3f"),
    Column("reach", "to reach", ".2f"),
    Column("reached", "reached"),
)


@dataclass(frozen=True, slots=True)
class Trial:
    """A recipe, the mean KL that it is to reach (None: it is there for comparison)."""

    name: str
    recipe: Recipe
    reach: float | None = None
    quick: bool = False
    """Whether the short table has it."""


def trials() -> tuple[Trial, ...]:
    """Return the rows in order, from 8 to 4 bits."""
    plain = _a(_W8, 8)
    rotated = replace(plain, rotation=_ALL)
    groups = _a(_W4, 4, PerGroup(64))
    blocks = replace(groups, rotation=replace(_ALL, block=64))
    return (
        Trial("W8A8 per tensor, static", _a(_W8, 8, PerTensor(), static=True)),
        Trial("W8A8 per tensor, dynamic", _a(_W8, 8, PerTensor())),
        Trial("W8A8 per token", plain, quick=True),
        Trial("W8A8 per token, SmoothQuant", replace(plain, smooth=_SMOOTH), _W8A8_BAR),
        Trial("W8A8 per token, Hadamard", rotated, _W8A8_BAR, quick=True),
        Trial("W8A4 per token", _a(_W8, 4)),
        Trial("W4A8 per token", _a(_W4, 8)),
        Trial("W4A4 per token", _a(_W4, 4)),
        Trial("W4A4 per token, Hadamard", replace(_a(_W4, 4), rotation=_ALL), _W4A4_BAR),
        Trial("W4A4 in groups of 64", groups),
        Trial("W4A4 in groups of 64, Hadamard", replace(groups, rotation=_ALL), _W4A4_BAR),
        Trial("W4A4 in groups of 64, blocks of 64", blocks, _W4A4_BAR, quick=True),
        Trial("W4A4 in groups of 32, blocks of 32, GPTQ", best(), _W4A4_BAR),
    )


def best() -> Recipe:
    """Return the recipe with 4 bits on both sides that costs least here."""
    gptq = Recipe.named("uint4-g32").with_weights(method="gptq", clip="mse")
    return replace(_a(gptq, 4, PerGroup(32)), rotation=replace(_ALL, block=32))


def _a(
    weights: Recipe, bits: int, granularity: Granularity = _TOKEN, *, static: bool = False
) -> Recipe:
    """Return the recipe with asymmetric activations of so many bits and 16-bit scales."""
    spec = ActivationSpec(INT_FORMATS[f"uint{bits}"], granularity, static)
    return replace(weights.with_weights(scale_dtype=torch.bfloat16), activations=spec)


def build(request: TableRequest) -> Table:
    """Quantize and measure one row per recipe."""
    loaded = load_reference(request.model, request.cache_dir, off_grid_seed=request.seed)
    measured = yardstick(loaded, request.text, windows=request.windows)
    skip = request.windows or len(measured.text.windows)
    texts = calibration_text(loaded.tokenizer, request.text, skip=skip, windows=_WINDOWS)
    rows = Rows(_COLUMNS, request.tell)
    comparable = False
    for trial in trials():
        if request.quick and not trial.quick:
            continue
        request.tell(trial.name)
        figures, bits = _measure(measured, trial.recipe, texts)
        comparable = is_peers(request, figures)
        rows.add(*_row(trial, figures, bits, comparable))
    return Table(
        "Activations in low bits", _COLUMNS, tuple(rows), _notes(request, measured, comparable)
    )


def _measure(measured: Yardstick, recipe: Recipe, texts: Sequence[Tensor]) -> tuple[Figures, float]:
    """Return the figures and the bits per weight of the layers that were quantized."""
    candidate, report = measured.quantized(recipe, calibration=texts if recipe.calibrated else None)
    return measured.measure(candidate, report), _layer_bits(measured, recipe, report)


def _layer_bits(measured: Yardstick, recipe: Recipe, report: QuantReport) -> float:
    """Return what the layers take: the whole model's bytes without those of the others."""
    names = scope_names(measured.module, measured.scopes)
    weights = [layer.weight for layer in select(measured.module, recipe, names).layers]
    others = model_size(measured.module)[0] - sum(w.numel() * w.element_size() for w in weights)
    return 8 * (report.size_bytes - others) / sum(weight.numel() for weight in weights)


def _row(trial: Trial, figures: Figures, bits: float, comparable: bool) -> tuple[Cell, ...]:
    """Return a row; on another protocol nothing is said to be reached."""
    reach = trial.reach if comparable else None
    return (
        trial.name,
        *_parts(trial.recipe),
        *(bits, figures.bits_per_weight, figures.kl, figures.kl_se),
        *(figures.same_top1, figures.ppl, reach),
        None if reach is None else figures.kl <= reach,
    )


def _parts(recipe: Recipe) -> tuple[str, str, str | None]:
    """Return how weights and activations are rounded, and what helps: uint4-g64, uint8 token."""
    weights = replace(recipe, activations=None).name
    spec = recipe.activations
    assert spec is not None
    per = {PerTensor: "tensor", PerChannel: "token"}.get(type(spec.granularity))
    per = per or f"g{spec.granularity.group_size(0)}"
    helps = [] if recipe.smooth is None else [f"smoothing, α = {recipe.smooth:g}"]
    if recipe.rotation is not None:
        block = recipe.rotation.block
        helps.append("R1 R2 R4" + ("" if block is None else f", blocks of {block}"))
    kind = f"{spec.format.name} per {per}" + (f", static ({spec.observer})" if spec.static else "")
    return weights, kind, "; ".join(helps) or None


def _notes(request: TableRequest, measured: Yardstick, comparable: bool) -> tuple[str, ...]:
    later = "the other prompts of core-v1" if request.text is None else "later windows of the text"
    notes = (
        f"{request.model} off its grid (seed {request.seed}), {measured.text.name}, "
        f"{measured.text.num_scored} scored tokens, execution dequantized",
        f"static scales, smoothing and GPTQ are calibrated on {later}"
        + ("" if request.text is None else f": {_WINDOWS} of 512 tokens"),
        "weights are rounded to nearest but for GPTQ, scales are bfloat16; bits per weight: what "
        "the layers take as stored, and the whole model with head and embedding in float32",
    )
    return notes if comparable else (*notes, not_peers_note("the bars"))
