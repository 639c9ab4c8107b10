"""int4 by group size: what a smaller group costs in bits and buys in error, and how fast it is.

Asymmetric int4 with an integer zero, rounded to nearest, bfloat16 scales; head and embedding stay
in float32, so bits per weight are those of the quantized layers alone. Speed is that of the native
operator for one row on the gate projection's shape, as a multiple of bfloat16 `F.linear`; a size
the native kernel doesn't take says so instead.
"""

import math
from dataclasses import replace

import torch
from torch import nn

from quantwatch.kernel_lab.bench import Contestant, measure_shape
from quantwatch.kernel_lab.measure import Yardstick
from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables.model import Cell, Column, Rows, Table, TableRequest
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.int4_linear import INT4_LINEAR, int4_aten_why_not
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import Recipe, WeightSpec

SIZES = ("g16", "g32", "g64", "g128", "channel")
_ROUNDS = 40
_COLUMNS = (
    Column("group", "group"),
    Column("bits_per_weight", "bits per weight of the layers", ".3f"),
    Column("relative_error", "‖ŵ − w‖ ÷ ‖w‖", ".4f"),
    Column("kl", "mean KL, nats", ".4f"),
    Column("kl_se", "± se", ".4f"),
    Column("same_top1", "same top-1", ".1%"),
    Column("ppl", "PPL", ".3f"),
    Column("speed", "× bf16, one row", ".2f"),
    Column("speed_low", "95 % from", ".2f"),
    Column("speed_high", "to", ".2f"),
    Column("why_no_speed", "no native kernel"),
)


def build(request: TableRequest) -> Table:
    """Measure one row per group size."""
    loaded = load_reference(request.model, request.cache_dir, off_grid_seed=request.seed)
    measured = yardstick(loaded, request.text, windows=request.windows)
    sizes = SIZES[2:] if request.quick else SIZES
    rows = Rows(_COLUMNS, request.tell)
    for size in sizes:
        request.tell(f"uint4-{size}")
        rows.add(*_row(measured, size))
    notes = (
        f"{request.model} off its grid (seed {request.seed}), {measured.text.name}, "
        f"{measured.text.num_scored} scored tokens, execution dequantized, rounding to nearest",
        f"speed: one row, one weight of {' × '.join(map(str, _shape(measured)))}, "
        f"{torch.get_num_threads()} thread(s)",
        "a group longer than a row is the whole row; the last group of a row may be short",
    )
    return Table("int4 by group size", _COLUMNS, tuple(rows), notes)


def _recipe(size: str) -> Recipe:
    return Recipe.named(f"uint4-{size}").with_weights(scale_dtype=torch.bfloat16)


def _row(measured: Yardstick, size: str) -> tuple[Cell, ...]:
    recipe = _recipe(size)
    candidate, report = measured.quantized(recipe)
    figures = measured.measure(candidate, report)
    bits, error = _weights(measured.module, candidate, recipe.weights)
    return (
        "whole row" if size == "channel" else int(size[1:]),
        *(bits, error, figures.kl, figures.kl_se, figures.same_top1, figures.ppl),
        *_speed(_shape(measured), recipe.weights),
    )


def _weights(reference: nn.Module, candidate: nn.Module, spec: WeightSpec) -> tuple[float, float]:
    """Return bits per weight and relative error over the layers that were changed."""
    size = count = 0
    noise = signal = 0.0
    ours = dict(candidate.named_parameters())
    for name, weight in reference.named_parameters():
        if weight.ndim != 2 or torch.equal(weight, ours[name]):
            continue
        size += spec.num_bytes(*weight.shape)
        count += weight.numel()
        noise += (ours[name].double() - weight.double()).square().sum().item()
        signal += weight.double().square().sum().item()
    if not count:
        raise ValueError("the recipe changed no weight.")
    return 8 * size / count, math.sqrt(noise / signal)


def _shape(measured: Yardstick) -> tuple[int, int]:
    """Return the shape [out, in] of the widest linear layer inside the decoder layers."""
    shapes = [
        (module.out_features, module.in_features)
        for path, module in measured.module.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in f".{path}."
    ]
    return max(shapes or [(64, 64)])


def _speed(shape: tuple[int, int], spec: WeightSpec) -> tuple[Cell, ...]:
    reason = int4_aten_why_not(*shape, spec)
    if reason is not None:
        return None, None, None, reason

    def make(weight: torch.Tensor) -> nn.Module:
        return PackedLinear(quantize_weight(weight, replace(spec)), None, INT4_LINEAR, "aten")

    contestant = Contestant(INT4_LINEAR.name, "aten", spec.format.name, make)
    speed = measure_shape((1, *shape), _ROUNDS, [contestant])[0]
    return speed.ratio, speed.ratio_low, speed.ratio_high, None
