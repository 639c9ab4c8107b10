"""The conformance grid finds what it is there for: mutants of every kind fail, right ones pass."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import quantwatch_kernels
from quantwatch_kernels.conformance.case import LAYOUTS, Ask, Made, OpCase, largest_error
from quantwatch_kernels.conformance.cases import all_cases
from quantwatch_kernels.conformance.run import run_case, run_cases
from quantwatch_kernels.registry import Op

ASK = Ask((3, 5, 33), torch.float32, "contiguous")


def product_case(run: Callable[[Tensor, Tensor], Tensor]) -> OpCase:
    """A product x·wᵀ whose back end `mutant` is the one under test."""
    op: Op[[Tensor, Tensor], Tensor] = Op("product")
    op.register("mutant", lambda x, _w: "no rows" if not len(x) else None)(run)
    op.register("dequantized")(lambda x, w: x @ w.T)

    def make(ask: Ask) -> Made:
        rows, outputs, inputs = ask.shape
        x, w = ask.randn(rows, inputs, seed=1), ask.randn(outputs, inputs, seed=2)
        value = x.double() @ w.double().T
        return Made((x, w), (value,), (x.double().abs() @ w.double().abs().T,))

    return OpCase(op, "", make, lambda _b, _d: 2e-7, ((3, 5, 33), (0, 5, 33)), (torch.float32,))


def reads_beyond(x: Tensor, w: Tensor) -> Tensor:
    """Read x as if it were contiguous."""
    flat = x.as_strided(x.shape, (x.shape[1], 1))
    return flat @ w.T


def leaves_one_out(x: Tensor, w: Tensor) -> Tensor:
    out = x @ w.T
    result = torch.full_like(out, torch.nan)
    result[:, :-1] = out[:, :-1]
    return result


def raises(x: Tensor, w: Tensor) -> Tensor:
    raise IndexError("out of range")


MUTANTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "drops the last input": lambda x, w: x[:, :-1] @ w[:, :-1].T,
    "ignores strides": reads_beyond,
    "leaves a column unwritten": leaves_one_out,
    "another shape": lambda x, w: (x @ w.T)[:, :-1],
    "one element in a thousand": lambda x, w: (x @ w.T) + 1e-4 * torch.eye(len(x), len(w)),
    "raises": raises,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name: str) -> None:
    """Catches a grid that can't fail: shapes, layouts, poison and the error per element."""
    found = list(run_cases([product_case(MUTANTS[name])]))
    failed = {(r.layout, r.shape) for r in found if r.status == "failed"}
    assert failed
    assert all(r.message for r in found if r.status == "failed")
    assert {r.status for r in found if r.backend == "dequantized"} == {"passed"}
    if name == "ignores strides":
        layouts = {layout for layout, _ in failed}
        assert layouts >= {"transposed", "strided", "expanded", "poisoned tail"}
        assert "contiguous" not in layouts


def test_the_right_one_passes_and_a_refusal_is_told() -> None:
    """Catches a refusal that counts as passed, or one without its reason and its fallback."""
    found = list(run_cases([product_case(lambda x, w: x @ w.T)]))
    refused = [r for r in found if r.status == "not applicable"]
    assert {(r.backend, r.shape) for r in refused} == {("mutant", (0, 5, 33))}
    assert {r.message for r in refused} == {"no rows"}
    assert {r.fallbacks for r in refused} == {(("dequantized", "no rows", 1),)}
    assert {r.status for r in found if r not in refused} == {"passed"}


def test_a_refusal_with_a_wrong_answer_fails() -> None:
    """Catches "not applicable" that hides a fallback which computes something else."""
    op: Op[[Tensor, Tensor], Tensor] = Op("product")
    op.register("picky", lambda _x, _w: "never")(lambda x, w: x @ w.T)
    op.register("dequantized")(lambda x, w: 2 * (x @ w.T))
    result = run_case(replace(product_case(raises), op=op), "picky", ASK)
    assert result.status == "failed"
    assert "dequantized is off by" in result.message


def test_errors_of_special_values() -> None:
    """Catches NaN = 0 error, a NaN beside a number that passes, and 0/0 where nothing may differ."""
    nan, inf = torch.nan, torch.inf
    value = torch.tensor([nan, inf, 0.0, 2.0], dtype=torch.float64)
    scale = torch.tensor([0.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    made = Made((), (value,), (scale,))
    assert largest_error((value.float(),), made) == 0
    assert largest_error((torch.tensor([nan, inf, 0.0, 2.1]),), made) == pytest.approx(0.05)
    for wrong in (
        [1.0, inf, 0.0, 2.0],
        [nan, -inf, 0.0, 2.0],
        [nan, inf, 1e-30, 2.0],
        [nan, inf, 0.0, nan],
    ):
        assert largest_error((torch.tensor(wrong),), made) == inf


def test_layouts_change_memory_only() -> None:
    """Catches a layout that changes values, and a tail that isn't poisoned."""
    x = torch.randn(4, 6)
    for name, layout in LAYOUTS.items():
        expected = x[:1].expand_as(x) if name == "expanded" else x
        assert torch.equal(layout(x), expected), name
    tail = LAYOUTS["poisoned tail"](x)
    beyond = torch.as_strided(tail, (5, 23), tail.stride())
    assert beyond[:4, 6:].isnan().all()
    assert beyond[4].isnan().all()


def test_every_operator_has_a_case() -> None:
    """Catches an operator that is added without a line in the table."""
    operators = set()
    for module in pkgutil.walk_packages(quantwatch_kernels.__path__, "quantwatch_kernels."):
        if "triton" in module.name:
            continue  # twins of operators that are declared elsewhere; needs the package
        values: list[Any] = list(vars(importlib.import_module(module.name)).values())
        operators |= {value.name for value in values if isinstance(value, Op)}
    assert operators == {case.op.name for case in all_cases()}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({case.op.name for case in all_cases()}))
def test_conformance(name: str) -> None:
    """The grid itself: each back end against its float64 twin, two dtypes and two layouts."""
    cases = [case for case in all_cases() if case.op.name == name]
    found = list(run_cases(cases, quick=True))
    assert [r for r in found if r.status == "failed"] == []
    assert any(r.status == "passed" for r in found)


def test_an_empty_strided_input_has_no_rows() -> None:
    """Catches the native int8 product that crashed on one, found by the grid (bug log 20)."""
    case = next(c for c in all_cases() if (c.op.name, c.variant) == ("int8_linear", "int8-channel"))
    result = run_case(case, "aten", Ask((0, 16, 64), torch.float32, "strided"))
    assert (result.status, result.error) == ("passed", 0)
