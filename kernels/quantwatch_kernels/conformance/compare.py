"""Inputs of the measuring operators; their float64 back end is the twin.

`lens_statistics` reads hidden states off through a head. In float32 its twin has a float64 head, so
that the rounding of the logits counts as an error, too. In 16 bits that rounding, which is the
model's own, would be half of a KL: there every id reads one channel, doubled, which is exact.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.compare.lens import LENS, LensStatistics, Readout
from quantwatch_kernels.compare.lens_rounded import LENS_ROUNDED
from quantwatch_kernels.compare.output import LEAKED, OUTPUT, Heads
from quantwatch_kernels.compare.sketch import HEAD_ROWS
from quantwatch_kernels.compare.tap import FEATURE, ISOLATED, NORMS, TAP
from quantwatch_kernels.conformance.case import (
    LAYOUTS,
    Ask,
    Made,
    OpCase,
    reference_case,
    scale_of,
)
from quantwatch_kernels.registry import Op

__all__ = ["compare_cases"]

_SHAPES = ((1, 1), (7, 33), (3, 127), (5, 1000), (2, 4099), (0, 16))
"""(rows, width): one id, widths around a block of 128, more than one chunk, no row."""
_IDS = 301
_WIDE = tuple(shape for shape in _SHAPES if shape[1] >= 16)


def compare_cases() -> tuple[OpCase, ...]:
    """Return the cases of all measuring operators."""
    return (
        reference_case(OUTPUT, _output, _within(1e-4), _WIDE),
        OpCase(LENS, "", _lens, _within(1e-4), _WIDE),
        *map(_rounded_lens, LENS_ROUNDED.values()),
        OpCase(HEAD_ROWS, "", _rows, _rounding, _WIDE),
        reference_case(FEATURE, _pair, _within(1e-4), _SHAPES),
        reference_case(NORMS, _pair, _within(1e-12), _SHAPES),
        reference_case(TAP, _pair, _within(1e-12), _SHAPES),
        reference_case(ISOLATED, _triple, _within(1e-12), _SHAPES),
        reference_case(LEAKED, _leaked, _within(1e-6), _WIDE),
    )


def _within(tolerance: float) -> Callable[[str, torch.dtype], float]:
    """Return what the statistics promise: the same in every dtype, their sums are float64."""
    return lambda _backend, _dtype: tolerance


def _pair(ask: Ask, size: float = 0.05) -> tuple[Tensor, ...]:
    reference, drift = ask.randn(*ask.shape, seed=3), ask.randn(*ask.shape, seed=4)
    return reference, LAYOUTS[ask.layout](reference + size * drift)


def _triple(ask: Ask) -> tuple[Tensor, ...]:
    return *_pair(ask), ask.randn(*ask.shape, seed=5)


def _leaked(ask: Ask) -> tuple[Tensor, int]:
    return ask.randn(*ask.shape, seed=3), ask.shape[1] - 1


def _output(ask: Ask) -> tuple[Any, ...]:
    reference, candidate = _pair(ask)
    targets = torch.arange(len(reference), device=reference.device) % ask.shape[1]
    return reference, candidate, targets, Heads(ask.dtype, ask.dtype, 10)


def _lens(ask: Ask) -> Made:
    # A KL of logits that were rounded by u has a relative error of about 2u ÷ drift.
    reference, candidate = _pair(ask, 0.3)
    weight = _head_weight(ask.shape[1], dense=ask.dtype == torch.float32)
    head = _head(weight.to(ask.device, ask.dtype))
    exact = _head(head.weight.double())
    twin: LensStatistics = LENS.run("reference", reference, candidate, _readout(exact), 2)
    scales = tuple(map(scale_of, twin))
    return Made((reference, candidate, _readout(head), 2), tuple(twin), scales)


def _rounded_lens(op: Op[..., LensStatistics]) -> OpCase:
    def make(ask: Ask) -> Made:
        # Nothing of the twin is rounded but the factors, so it need not have another head.
        reference, candidate = _pair(ask, 0.3)
        head = _head(_head_weight(ask.shape[1], dense=True).to(ask.device, ask.dtype))
        args = (reference, candidate, _readout(head), 2)
        twin = op.run("reference", *args)
        return Made(args, tuple(twin), tuple(map(scale_of, twin)))

    return OpCase(op, "", make, _within(1e-4), _WIDE, dtypes=(torch.float32,))


def _rows(ask: Ask) -> Made:
    """Make rows of a head whose ids repeat; errors are relative to Σ |products|."""
    h = LAYOUTS[ask.layout](ask.randn(*ask.shape, seed=3))
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(_IDS, (len(h), 9), generator=generator).int().to(ask.device)
    head = _head(_head_weight(ask.shape[1], dense=True).to(ask.device, ask.dtype))
    products = head.weight.double()[ids.long()] * h.double()[:, None]
    return Made((h, ids, _readout(head)), (products.sum(-1),), (products.abs().sum(-1) + 1e-30,))


def _rounding(_backend: str, dtype: torch.dtype) -> float:
    """Return what a product's last rounding may take, and in float32 that of its partial sums."""
    return 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps * 0.51


def _head_weight(width: int, *, dense: bool) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    if dense:
        return torch.randn(_IDS, width, generator=generator) * (6 / math.sqrt(width))
    channel = torch.randint(width, (_IDS,), generator=generator)
    return torch.zeros(_IDS, width).scatter_(1, channel[:, None], 4.0)


def _head(weight: Tensor) -> nn.Linear:
    outputs, inputs = weight.shape
    head = nn.Linear(inputs, outputs, bias=False, device="meta")
    head.weight = nn.Parameter(weight, requires_grad=False)
    return head


def _readout(head: nn.Linear) -> Readout:
    return Readout(lambda h: h / 2, head)
