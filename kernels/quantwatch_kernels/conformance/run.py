"""Run the conformance grid: a case passes, fails, or doesn't apply for a reason.

A back end that refuses is run all the same through the registry: the back end that answers for it
must be right, and the fallback counted. Memory that `torch.empty` hands out is poisoned meanwhile,
so that an element which nobody writes is a NaN and not yesterday's right answer.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.conformance.case import Ask, Made, OpCase, largest_error
from quantwatch_kernels.registry import Fallback, fallbacks
from quantwatch_kernels.testing import poison_empty

__all__ = ["CaseResult", "Status", "cells", "run_case", "run_cases"]

Status = Literal["passed", "failed", "not applicable"]
_QUICK_LAYOUTS = ("contiguous", "poisoned tail")
_QUICK_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One operator on one cell of the grid. `error` is None where there was nothing to compare."""

    operator: str
    backend: str
    variant: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    status: Status
    error: float | None
    tolerance: float
    message: str
    """Why it failed or doesn't apply; empty when passed."""
    fallbacks: tuple[tuple[str, str, int], ...]
    """(back end that answered, reason, count of calls or rows)."""

    @property
    def num_fallbacks(self) -> int:
        """Calls and rows that another back end did."""
        return sum(count for _, _, count in self.fallbacks)


def run_cases(
    cases: Iterable[OpCase], *, device: str = "cpu", quick: bool = False
) -> Iterator[CaseResult]:
    """Run every back end of every case on every cell; `quick` keeps two dtypes and layouts."""
    workspace.clear()
    for case in cases:
        for backend in case.op.backends:
            for ask in cells(case, device, quick=quick):
                yield run_case(case, backend, ask)
    workspace.clear()


def cells(case: OpCase, device: str, *, quick: bool = False) -> Iterator[Ask]:
    """Yield what a case is asked for: every shape, dtype and layout."""
    for shape in case.shapes:
        for dtype in case.dtypes:
            for layout in case.layouts:
                if quick and (dtype not in _QUICK_DTYPES or layout not in _QUICK_LAYOUTS):
                    continue
                yield Ask(shape, dtype, layout, device)


def run_case(case: OpCase, backend: str, ask: Ask) -> CaseResult:
    """Run one back end on one cell. Whatever it raises is a failed case, not the end of the run."""
    made = case.make(ask)
    before = fallbacks()
    result = CaseResult(
        operator=case.op.name,
        backend=backend,
        variant=case.variant,
        shape=ask.shape,
        dtype=str(ask.dtype).removeprefix("torch."),
        layout=ask.layout,
        status="passed",
        error=None,
        tolerance=case.tolerance(backend, ask.dtype),
        message="",
        fallbacks=(),
    )
    try:
        reason = case.op.why_not(backend, *made.args)
        found = _found(case, backend, made)
        error = largest_error(found, made)
    except Exception as raised:  # noqa: BLE001 — whatever an operator raises is its failure
        return replace(result, status="failed", message=f"{type(raised).__name__}: {raised}")
    counted = _counted(before)
    result = replace(result, error=error, fallbacks=counted)
    return _judged(result, case, ask, reason)


def _found(case: OpCase, backend: str, made: Made) -> tuple[Tensor, ...]:
    with torch.no_grad(), poison_empty("quantwatch_kernels"):
        found = case.op.run(backend, *made.args)
    return (found,) if isinstance(found, Tensor) else tuple(x for x in found if x is not None)


def _counted(before: dict[Fallback, int]) -> tuple[tuple[str, str, int], ...]:
    return tuple(
        (fallback.used, fallback.reason, count - before.get(fallback, 0))
        for fallback, count in fallbacks().items()
        if count > before.get(fallback, 0)
    )


def _judged(result: CaseResult, case: OpCase, ask: Ask, reason: str | None) -> CaseResult:
    used, tolerance = result.backend, result.tolerance
    if reason is not None:
        answered = [name for name, why, _ in result.fallbacks if why == reason]
        if not answered:
            return replace(result, status="failed", message=f"not counted: {reason}")
        used = answered[0]
        tolerance = case.tolerance(used, ask.dtype)
        result = replace(result, tolerance=tolerance)
    assert result.error is not None
    if not result.error <= tolerance:
        words = f"{used} is off by {result.error:.3g}, allowed {tolerance:.3g}"
        return replace(result, status="failed", message=words)
    if reason is not None:
        return replace(result, status="not applicable", message=reason)
    return result
