"""Speed of the quantized linear operators as a multiple of bfloat16 `F.linear`'s, interleaved.

On a shared machine absolute times move by a factor of two between runs, and a weight that was just
used is still in the cache. So in each round the baseline and every back end run once each, in an
order that rotates, over enough copies of the weight to leave the cache; a round gives one ratio.
The figure is the median over rounds, its interval a percentile bootstrap over rounds (seeded). All
that a call costs is inside: quantizing the input, casting it, rescaling the result.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantwatch.store.kernels import KernelSpeed
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.int4_linear import INT4_LINEAR
from quantwatch_kernels.quantize.int8_linear import INT8_LINEAR
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.quantize.w8a8_linear import W8A8_LINEAR, W8A8Linear
from quantwatch_kernels.registry import fallbacks

SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536), (2048, 2048))
"""(outputs, inputs): q and o, k and v, gate and up, down of SmolLM2-135M; a larger one."""
ROWS = (1, 4, 16, 128)
QUICK_SHAPES, QUICK_ROWS = SHAPES[2:3], (1, 16)
_CACHE_BYTES = 48 << 20
_MOST_COPIES = 80
_RESAMPLES = 999


@dataclass(frozen=True, slots=True)
class Contestant:
    """An operator on one kind of weights; `make` packs a float weight."""

    operator: str
    backend: str
    variant: str
    make: Callable[[Tensor], nn.Module]


def _packed(name: str, backend: str) -> Callable[[Tensor], nn.Module]:
    spec = Recipe.named(name).weights
    op = INT4_LINEAR if spec.format.bits == 4 else INT8_LINEAR
    return lambda weight: PackedLinear(quantize_weight(weight, spec), None, op, backend)


def _w8a8(weight: Tensor) -> nn.Module:
    spec = Recipe.named("int8-channel").weights
    return W8A8Linear(quantize_weight(weight, spec), None, backend="aten")


CONTESTANTS = (
    *(
        Contestant(INT4_LINEAR.name, backend, "int4-g64", _packed("int4-g64", backend))
        for backend in ("aten", "by_rows")
    ),
    *(
        Contestant(INT8_LINEAR.name, backend, "int8-channel", _packed("int8-channel", backend))
        for backend in ("aten", "by_rows")
    ),
    Contestant(W8A8_LINEAR.name, "aten", "int8-channel", _w8a8),
)


def run_bench(
    *, rounds: int = 40, quick: bool = False, tell: Callable[[str], None] = lambda _line: None
) -> list[KernelSpeed]:
    """Measure all contestants on all shapes; the caller pins the threads.

    Raises ValueError for fewer than 5 rounds: an interval needs some.
    """
    if rounds < 5:
        raise ValueError(f"rounds must be at least 5; they are {rounds}.")
    found: list[KernelSpeed] = []
    for outputs, inputs in QUICK_SHAPES if quick else SHAPES:
        for rows in QUICK_ROWS if quick else ROWS:
            tell(f"{rows} × {inputs} → {outputs}")
            found += measure_shape((rows, outputs, inputs), rounds, CONTESTANTS)
    return found


def measure_shape(
    shape: tuple[int, int, int], rounds: int, contestants: Iterable[Contestant]
) -> list[KernelSpeed]:
    """Time the baseline and every contestant on (rows, outputs, inputs), interleaved."""
    rows, outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator).to(torch.bfloat16)
    copies = min(max(2, math.ceil(_CACHE_BYTES / (2 * outputs * inputs))), _MOST_COPIES)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.05
    plain = [weight.to(torch.bfloat16) for _ in range(copies)]
    runs: list[Callable[[int], object]] = [lambda copy: nn.functional.linear(x, plain[copy])]
    fields, messages = list(contestants), []
    with torch.inference_mode():
        for field in fields:
            layers = [field.make(weight) for _ in range(copies)]
            messages.append(_answered(field, layers, x))
            runs.append(lambda copy, layers=layers: layers[copy](x))  # type: ignore[misc]
        baseline, *seconds = interleaved(runs, copies, rounds)
    return [
        _speed(field, shape, (baseline, mine), message)
        for field, mine, message in zip(fields, seconds, messages, strict=True)
    ]


def _answered(field: Contestant, layers: list[nn.Module], x: Tensor) -> str:
    """Run each copy once, which makes its native layout, and say who else answered, if anyone."""
    before = fallbacks()
    for layer in layers:
        layer(x)
    new = [
        fallback
        for fallback, count in fallbacks().items()
        if count > before.get(fallback, 0) and fallback.op.startswith(field.operator)
    ]
    return "; ".join(f"{fallback.used}: {fallback.reason}" for fallback in new)


def interleaved(runs: list[Callable[[int], object]], copies: int, rounds: int) -> list[list[float]]:
    """Return the seconds of one call of each, round by round; the first two rounds warm up."""
    seconds: list[list[float]] = [[] for _ in runs]
    for round_ in range(rounds + 2):
        for turn in range(len(runs)):
            which = (turn + round_) % len(runs)
            begin = time.perf_counter()
            runs[which](round_ % copies)
            taken = time.perf_counter() - begin
            if round_ >= 2:
                seconds[which].append(taken)
    return seconds


def _speed(
    field: Contestant,
    shape: tuple[int, ...],
    seconds: tuple[list[float], list[float]],
    message: str,
) -> KernelSpeed:
    baseline, mine = seconds
    ratios = np.array(baseline) / np.array(mine)
    low, high = median_interval(ratios)
    return KernelSpeed(
        operator=field.operator,
        backend=field.backend,
        variant=field.variant,
        shape=shape,
        dtype="bfloat16",
        ratio=float(np.median(ratios)),
        ratio_low=low,
        ratio_high=high,
        seconds=median(mine),
        baseline_seconds=median(baseline),
        rounds=len(ratios),
        threads=torch.get_num_threads(),
        message=message,
    )


def median_interval(ratios: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the median over rounds."""
    drawn = np.random.default_rng(0).integers(len(ratios), size=(_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), (0.025, 0.975))
    return float(low), float(high)
