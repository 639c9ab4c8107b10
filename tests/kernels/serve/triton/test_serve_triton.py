"""Serving kernels in Triton: odd shapes, strides, poisoned surroundings, guarded outputs, refusals.

Their numbers against float64, over shapes, dtypes and layouts, are the conformance grid's
(`test_grid`); here is what the grid can't say.
"""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.quantize.triton.helpers import DTYPES, device, guarded_outputs, surrounded
from torch import Tensor

from quantwatch_kernels.conformance.cases import all_cases
from quantwatch_kernels.conformance.run import run_cases
from quantwatch_kernels.formats import INT4, INT8
from quantwatch_kernels.quantize.recipe import ActivationSpec, Recipe
from quantwatch_kernels.quantize.row_ops import QUANTIZE_ROWS
from quantwatch_kernels.quantize.triton.available import triton_why_not
from quantwatch_kernels.registry import fallbacks, prefer
from quantwatch_kernels.serve.attention_int8 import ATTENTIONS, int8_attention
from quantwatch_kernels.serve.fused_act import ACT_MUL, ACT_MUL_QUANTIZE, ACTIVATIONS, Activation
from quantwatch_kernels.serve.fused_norm import ADD_RMS_NORM, ADD_RMS_NORM_QUANTIZE, Casting, Norm
from quantwatch_kernels.serve.int8_qk import INT8_QK, Coded
from quantwatch_kernels.serve.kv_codes import KV_QUANTIZE
from quantwatch_kernels.serve.kv_scheme import PlaneScheme
from quantwatch_kernels.serve.moe_experts import ExpertStack
from quantwatch_kernels.serve.moe_gemm import MOE_GEMM
from quantwatch_kernels.serve.paged_attention import (
    PAGED_ATTENTION,
    AttentionRule,
    paged_attention,
)
from quantwatch_kernels.serve.paged_plan import PagedPlan

pytestmark = [] if device() == "cpu" else [pytest.mark.gpu]
SERVING = (
    "paged_attention", "int8_qk", "kv_quantize", "moe_gemm", "add_rms_norm",
    "add_rms_norm_quantize", "act_mul", "act_mul_quantize",
)  # fmt: skip


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device())


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVING)
def test_grid(name: str) -> None:
    """The quick grid on the GPU, bfloat16 included. On a CPU: test_conformance.py."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    cases = [case for case in all_cases() if case.op.name == name]
    found = [r for r in run_cases(cases, device="cuda", quick=True) if r.backend == "triton"]
    assert [r for r in found if r.status == "failed"] == []
    assert any(r.status == "passed" and r.dtype == "float32" for r in found)


# --- norm and product


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 17, 2049])
@pytest.mark.parametrize("casting", ["llama", "gemma"])
def test_norm_in_poison(casting: Casting, columns: int, dtype: torch.dtype) -> None:
    """Catches a lane beyond the row that enters the mean or the scale (bug log 26), a write beyond
    the end, and codes that aren't those of the two steps, bit for bit."""
    x, residual = (surrounded(random(3, columns, seed=s).to(dtype)) for s in (1, 2))
    weight, norm = random(columns, seed=3).to(dtype), Norm(1e-5, casting)
    with guarded_outputs():
        y, summed = ADD_RMS_NORM.run("triton", x, residual, weight, norm)
        codes, scales, again = ADD_RMS_NORM_QUANTIZE.run("triton", x, residual, weight, norm)
    assert torch.equal(summed, x + residual)
    assert torch.equal(again, summed)
    expected, _ = ADD_RMS_NORM.run("reference", x, residual, weight, norm)
    step = torch.finfo(dtype).eps * 2
    assert float(((y - expected).double() / (expected.double().abs() + step)).abs().max()) < step
    wanted = QUANTIZE_ROWS.run("torch", y)
    assert torch.equal(codes, wanted[0])
    assert torch.equal(scales, wanted[1])
    assert not fallbacks()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 17, 2049])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_product_in_poison(kind: Activation, columns: int, dtype: torch.dtype) -> None:
    """As above, for act(gate) · up, with gates where e⁻ᵍ overflows."""
    gate, up = (surrounded(20 * random(3, columns, seed=s).to(dtype)) for s in (1, 2))
    gate[0, 0] = -120.0
    gate[1, 0] = 120.0
    with guarded_outputs():
        y = ACT_MUL.run("triton", gate, up, kind)
        codes, scales = ACT_MUL_QUANTIZE.run("triton", gate, up, kind)
    expected = ACT_MUL.run("reference", gate, up, kind)
    step, size = torch.finfo(dtype).eps, (gate.double() * up.double()).abs() * 2**-22
    gap = (y.double() - expected.double()).abs()
    assert bool((gap <= 2 * step * expected.double().abs() + size).all())
    wanted = QUANTIZE_ROWS.run("torch", y)
    assert torch.equal(codes, wanted[0])
    assert torch.equal(scales, wanted[1])
    assert not fallbacks()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of ∞ · 0
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_rows_that_are_not_finite(bad: float) -> None:
    """Catches a NaN that a maximum drops, and one that reaches its neighbours (bug log 39)."""
    x, weight = random(3, 20), random(20, seed=1)
    x[1, 19] = bad
    y, _ = ADD_RMS_NORM.run("triton", x, None, weight, Norm(1e-5))
    codes, scales, summed = ADD_RMS_NORM_QUANTIZE.run("triton", x, None, weight, Norm(1e-5))
    assert summed is x
    assert y[1].isnan().any()
    assert scales.isnan().flatten().tolist() == [False, True, False]
    assert not codes[1].any()
    product, made = ACT_MUL_QUANTIZE.run("triton", x, torch.ones_like(x), "silu")
    assert made.isnan().flatten().tolist() == [False, True, False]
    assert not product[1].any()


def test_fused_refusals() -> None:
    """Catches a gradient that is lost without a word, and a dtype that is computed in less."""
    x, weight = random(2, 8), random(8, seed=1)
    assert ADD_RMS_NORM.why_not("triton", x, None, weight.requires_grad_(), Norm(1e-5)) == (
        "the Triton kernel has no backward pass"
    )
    with torch.no_grad():
        assert ADD_RMS_NORM.why_not("triton", x, None, weight, Norm(1e-5)) is None
    double = "the Triton kernel computes in float32, not float64"
    assert ACT_MUL.why_not("triton", x.double(), x.double(), "silu") == double
    if device() == "cpu":
        half = x.bfloat16()
        assert "bfloat16" in str(ACT_MUL.why_not("triton", half, half, "silu"))
        y = ACT_MUL.run("triton", half, half, "silu")
        assert torch.equal(y, ACT_MUL.run("aten", half, half, "silu"))
        assert sum(fallbacks().values()) == 1


@pytest.mark.parametrize("op", [ADD_RMS_NORM, ACT_MUL], ids=lambda op: str(op.name))
def test_no_rows(op: Any) -> None:
    """Catches a grid of nothing (bug log 20)."""
    x = random(0, 8)
    args = (x, x, random(8), Norm(1e-5)) if op is ADD_RMS_NORM else (x, x, "silu")
    found = op.run("triton", *args)
    assert (found if isinstance(found, Tensor) else found[0]).shape == (0, 8)


# --- scores from codes


def coded(x: Tensor, rest: bool) -> Coded:
    scales = x.abs().amax(-1, keepdim=True) / 127
    codes = (x / scales).round().clamp(-127, 127)
    return Coded(codes.to(torch.int8), scales, (x - codes * scales).half() if rest else None)


@pytest.mark.parametrize("residuals", [(False, False), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize(("queries", "keys", "features"), [(1, 1, 1), (17, 65, 33), (70, 3, 130)])
def test_scores_in_poison(queries: int, keys: int, features: int, residuals: Any) -> None:
    """Catches a read beyond the last query, key or feature, of codes and of residuals."""
    q, k = random(1, 1, queries, features), random(1, 1, keys, features, seed=1)
    operands: Any = [coded(x, rest) for x, rest in zip((q, k), residuals, strict=True)]
    expected = INT8_QK.run("reference", operands[0], operands[1], q)
    held: Any = [
        Coded._make(None if part is None else surrounded(part[0, 0])[None, None] for part in each)
        for each in operands
    ]
    with guarded_outputs():
        found = INT8_QK.run("triton", held[0], held[1], surrounded(q[0, 0])[None, None])
    assert float((found - expected).abs().max()) < 2e-6 * float(expected.abs().max() + 1)
    assert not fallbacks()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_int8_attention_through_triton(name: str) -> None:
    """Catches expanded scales (one per tensor) that are read as if there were one per token."""
    q, k, v = random(2, 4, 9, 16), random(2, 2, 9, 16, seed=1), random(2, 2, 9, 16, seed=2)
    with prefer("aten"):
        wanted = int8_attention(q, k, v, ATTENTIONS[name])
    with prefer("triton"):
        found = int8_attention(q, k, v, ATTENTIONS[name])
    assert torch.allclose(found.out, wanted.out, atol=1e-6)
    assert torch.allclose(found.lse, wanted.lse, atol=1e-5)
    assert not fallbacks()


# --- attention through pages


def paged(
    lengths: list[int], counts: list[int], dtype: torch.dtype = torch.float32, page: int = 4
) -> Any:
    """Queries, where they begin, pages with NaN wherever no token is, and the plan; reversed ids."""
    needed = [-(-n // page) for n in lengths]
    planes = [random(1 + sum(needed), page, 2, 24, seed=s).to(dtype) for s in (1, 2)]
    ids, at = [], 1
    for length, count in zip(lengths, needed, strict=True):
        ids.append(list(range(at, at + count))[::-1])
        for plane in planes:
            plane[ids[-1][-1], (length - 1) % page + 1 :] = torch.nan
        at += count
    for plane in planes:
        plane[0] = torch.nan
    ints = ([0, *needed], [i for own in ids for i in own], [(n - 1) % page + 1 for n in lengths])
    indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in ints)
    start = torch.zeros(len(lengths), dtype=torch.int32)
    plan = PagedPlan(indptr.cumsum(0).int(), indices, last, start, page)
    queries = random(sum(counts), 6, 24, seed=3).to(dtype)
    return queries, torch.tensor([0, *counts]).cumsum(0), (planes[0], planes[1]), plan


RULES = {
    "plain": AttentionRule(),
    "soft-cap": AttentionRule(softcap=0.7),
    "window 1": AttentionRule(window=1),
    "window of a page and one": AttentionRule(window=5),
}


@pytest.mark.parametrize("parts", [None, 3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages(dtype: torch.dtype, rule: AttentionRule, parts: int | None) -> None:
    """Catches stale slots that are read (bug log 28, 29), a window off by one, a part that holds
    nothing for a query and gives NaN, and heads that read another one's keys."""
    queries, q_indptr, pages, plan = paged([3, 4, 5, 14, 1], [1, 0, 2, 1, 1], dtype)
    with prefer("reference"):
        wanted = paged_attention(queries, q_indptr, pages, plan, rule)
    with guarded_outputs(), prefer("triton"):
        found = paged_attention(queries, q_indptr, pages, plan, rule, parts)
    close = 3e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert found.out.dtype == dtype
    assert torch.allclose(found.out, wanted.out, rtol=close, atol=close)
    assert torch.allclose(found.lse, wanted.lse, rtol=1e-5, atol=1e-5)
    assert not fallbacks()


def test_pages_that_a_window_left_behind() -> None:
    """Catches positions that are counted from the first listed page as if it were the first."""
    queries, q_indptr, pages, plan = paged([18], [2])
    rule, kept = AttentionRule(window=6), plan.kv_indices[2:]
    short = plan._replace(
        kv_indptr=torch.tensor([0, len(kept)], dtype=torch.int32), kv_indices=kept,
        kv_start=torch.tensor([8], dtype=torch.int32),
    )  # fmt: skip
    with prefer("triton"):
        whole = paged_attention(queries, q_indptr, pages, plan, rule)
        found = paged_attention(queries, q_indptr, pages, short, rule)
    assert torch.allclose(found.out, whole.out, atol=1e-6)
    assert torch.allclose(found.lse, whole.lse, atol=1e-6)


def test_a_nan_that_a_query_sees() -> None:
    """Catches a NaN that a running maximum swallows; the other sequence is unharmed."""
    queries, q_indptr, pages, plan = paged([6, 6], [1, 1])
    clean = PAGED_ATTENTION.run("triton", queries, q_indptr, pages, plan, AttentionRule(), None)
    pages[0][plan.kv_indices[0], 1] = torch.nan
    found = PAGED_ATTENTION.run("triton", queries, q_indptr, pages, plan, AttentionRule(), None)
    assert found.out[0].isnan().all()
    assert found.lse[0].isnan().all()
    assert torch.equal(found.out[1], clean.out[1])


def test_paged_refusals() -> None:
    """Catches two dtypes in one product, and heads too wide for a program."""
    queries, q_indptr, pages, plan = paged([3], [1])
    rest: Any = (q_indptr, pages, plan, AttentionRule(), None)
    said = PAGED_ATTENTION.why_not("triton", queries.half(), *rest)
    assert said == "the Triton kernel multiplies one dtype, not torch.float16 with torch.float32"
    wide = random(1, 2, 300)
    pages_wide = (random(2, 4, 2, 300), random(2, 4, 2, 300))
    said = PAGED_ATTENTION.why_not("triton", wide, q_indptr, pages_wide, *rest[2:])
    assert said == "heads of 300 features; a program holds 256"
    no = torch.zeros(0, dtype=torch.int32)
    empty = PagedPlan(torch.zeros(1, dtype=torch.int32), no, no, no, 4)
    with prefer("triton"):
        none = paged_attention(queries[:0], torch.zeros(1).long(), pages, empty)
    assert none.out.shape == (0, 6, 24)


# --- experts


@pytest.mark.parametrize("kind", ["int8-channel", "uint4-g32", "int4-g64, A4", "int8-g64, A8"])
@pytest.mark.parametrize("chosen", ["one", "none", "spread"])
def test_experts_in_poison(chosen: str, kind: str) -> None:
    """Catches an expert without tokens that is read (bug log 21), a slot on another device that is
    written, rows beyond the last, a short last group."""
    name, _, inputs = kind.partition(", A")
    activations = ActivationSpec(INT4 if inputs == "4" else INT8) if inputs else None
    stack = ExpertStack(random(4, 37, 91).cpu() * 0.1, Recipe.named(name).weights, activations)
    stack = stack.to(device())
    stack.scales[1] = torch.nan  # nobody's
    ids = {"one": [[2, 2]] * 5, "none": [[-1, -1]] * 5, "spread": [[0, 2], [3, -1]] * 2 + [[2, 0]]}
    wanted_ids = torch.tensor(ids[chosen], device=device())
    x = surrounded(random(5, 91, seed=1))
    expected = MOE_GEMM.run("reference", x, wanted_ids, stack, 4)
    found = MOE_GEMM.run("triton", x, wanted_ids, stack, 4)
    assert not bool(found[wanted_ids < 0].any())
    assert torch.allclose(found, expected, rtol=1e-5, atol=2e-6)
    # Sums of eighths are exact in any order. (Interpreted, a product's is that of the processor's
    # BLAS, which may depend on where in a block a row lies.)
    x = surrounded((8 * random(5, 91, seed=1)).round() / 8)
    found = MOE_GEMM.run("triton", x, wanted_ids, stack, 4)
    rows = x[:, None].expand(5, 2, 91)
    assert torch.equal(MOE_GEMM.run("triton", rows, wanted_ids, stack, 16), found)
    assert not fallbacks()


def test_expert_refusals() -> None:
    """Catches codes that don't fit the integer product, and bits that aren't unpacked."""
    x, ids = random(2, 32), torch.zeros(2, 1, dtype=torch.long, device=device())

    def said(name: str, inputs: ActivationSpec | None = None) -> str | None:
        stack = ExpertStack(random(2, 4, 32).cpu(), Recipe.named(name).weights, inputs)
        return MOE_GEMM.why_not("triton", x, ids, stack.to(device()), 16)

    assert said("int3-g32") == "the Triton kernel unpacks 4 and 8 bits, not 3"
    words = "codes less their zero don't fit the int8 that is multiplied"
    assert said("uint8-channel", ActivationSpec(INT8)) == f"uint8 {words}"
    assert said("uint8-channel") is None


# --- a cache's rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "plane",
    [
        PlaneScheme(8), PlaneScheme(8, symmetric=True), PlaneScheme(4), PlaneScheme(4, group=32),
        PlaneScheme(4, symmetric=True, group=32),
    ],
    ids=lambda p: f"{p.bits} bits, group {p.group}, {'symmetric' if p.symmetric else 'zeros'}",
)  # fmt: skip
@pytest.mark.parametrize(
    "columns", [1, 33, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 70))]
)
def test_kv_rows_are_bit_equal(columns: int, plane: PlaneScheme, dtype: torch.dtype) -> None:
    """Catches another rounding of scale, zero or code; rows of zeros, of one value, all positive,
    too small for float16's scales, and not finite."""
    x = random(8, columns)
    x[1], x[2], x[3] = 0.0, 3.0, x[3].abs() + 10
    x[4] = torch.arange(columns) / 2 - 3
    x[6, columns - 1], x[7, 0] = torch.nan, torch.inf
    for rows in (x, x * 1e-5 if dtype == torch.float32 else -x):
        held = surrounded(rows.to(dtype))
        with guarded_outputs():
            found = KV_QUANTIZE.run("triton", held, plane.spec)
        wanted = KV_QUANTIZE.run("torch", held, plane.spec)
        assert torch.equal(found[0], wanted[0])
        assert found[1].dtype == wanted[1].dtype
        assert torch.equal(found[1].nan_to_num(-1), wanted[1].nan_to_num(-1))
        assert (found[2] is None) == (wanted[2] is None)
        if found[2] is not None and wanted[2] is not None:
            assert torch.equal(found[2], wanted[2])
    assert not fallbacks()


@given(st.integers(1, 3), st.integers(1, 40), st.integers(-20, 12), st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_kv_rows_of_any_size(rows: int, columns: int, power: int, seed: int) -> None:
    """The definition, whatever the shape and the size of the values."""
    x, spec = random(rows, columns, seed=seed) * 2.0**power, PlaneScheme(4, group=16).spec
    found, wanted = ([*KV_QUANTIZE.run(name, x, spec)] for name in ("triton", "torch"))
    for a, b in zip(found, wanted, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (PlaneScheme(2).spec, "packs 4 and 8 bits, not 2"),
        (PlaneScheme(4, clip="mse").spec, "each group's whole range"),
        (PlaneScheme(4, group=5).spec, "groups of 5: two of them would share a byte"),
        (replace(PlaneScheme(4).spec, scale_dtype=torch.bfloat16), "scales to float16, not"),
    ],
    ids=["2 bits", "searched", "odd group", "bfloat16 scales"],
)
def test_kv_refusals(spec: Any, said: str) -> None:
    """Catches a wrong answer where there should be a reason."""
    assert said in str(KV_QUANTIZE.why_not("triton", random(2, 20), spec))


@pytest.mark.skipif(device() != "cpu", reason="about a machine without a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a kernel that is tried on a device it can't run on."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    said = "Triton kernels run on CUDA devices, not cpu"
    assert triton_why_not(random(1, 1)) == said
    queries, *rest = paged([3], [1])
    asked = PAGED_ATTENTION.why_not(
        "triton", queries, rest[0], rest[1], rest[2], RULES["plain"], None
    )
    assert asked == said
