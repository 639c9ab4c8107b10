"""The serving operators in gpu.py: right on this device, and how near to its roofline.

`grid` runs each operator's Triton kernel over the shapes of the conformance grid, in one dtype and
surrounded by NaN: a kernel is compiled anew for each, so all dtypes and layouts are left to `make
test-gpu`. `timed` times one whole call of each at a size that serving has, what it plans on the
host included, caches flushed before each, and prints the time, the bytes and operations per second
that it comes to, the share of the roofline (the longer of bytes ÷ the copy's and operations ÷ the
product's, both measured in the same run, ÷ the time) and the error against the operator's float64
back end on the same input. Bytes are those that must be moved once: inputs, weights and outputs,
not what a kernel reads again.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from gpu_layers import drawn
from torch import Tensor

from quantwatch_kernels.conformance.cases import all_cases
from quantwatch_kernels.conformance.run import CaseResult, run_cases
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.registry import Op
from quantwatch_kernels.serve.fused_act import ACT_MUL, ACT_MUL_QUANTIZE
from quantwatch_kernels.serve.fused_norm import ADD_RMS_NORM, ADD_RMS_NORM_QUANTIZE, Norm
from quantwatch_kernels.serve.int8_qk import INT8_QK, Coded
from quantwatch_kernels.serve.kv_codes import KV_QUANTIZE
from quantwatch_kernels.serve.kv_scheme import PlaneScheme
from quantwatch_kernels.serve.moe_experts import ExpertStack
from quantwatch_kernels.serve.moe_gemm import MOE_GEMM
from quantwatch_kernels.serve.paged_attention import PAGED_ATTENTION, AttentionRule
from quantwatch_kernels.serve.paged_plan import PagedPlan

OPERATORS = (
    PAGED_ATTENTION, INT8_QK, KV_QUANTIZE, MOE_GEMM, ADD_RMS_NORM, ADD_RMS_NORM_QUANTIZE, ACT_MUL,
    ACT_MUL_QUANTIZE,
)  # fmt: skip
Found = list[dict[str, Any]]


class Timer(Protocol):
    def median(self, call: Callable[[], object], repeats: int = 10) -> float: ...


@dataclass(frozen=True)
class Size:
    """How large a workload is."""

    rows: int
    width: int
    inner: int
    sequences: int
    keys: int
    experts: int


LARGE = Size(rows=4096, width=4096, inner=14336, sequences=64, keys=4096, experts=8)
SMALL = Size(rows=3, width=64, inner=96, sequences=2, keys=19, experts=3)


@dataclass(frozen=True)
class Workload:
    """One call of an operator."""

    what: str
    op: Op[..., Any]
    args: tuple[Any, ...]
    num_bytes: int
    operations: int
    arithmetic: str = "bfloat16"
    limit: float = 1e-2
    """Of the error, ‖difference‖ ÷ ‖float64‖; of codes the share that differs."""


def size_of(*parts: Tensor | None) -> int:
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def fused(size: Size, device: str, dtype: torch.dtype) -> Iterator[Workload]:
    x, residual = (drawn(size.rows, size.width, device=device, seed=s).to(dtype) for s in (1, 2))
    weight, norm = drawn(size.width, device=device, seed=3).to(dtype), Norm(1e-5)
    read, count = size_of(x, residual, weight), x.numel()
    args = (x, residual, weight, norm)
    yield Workload("add_rms_norm", ADD_RMS_NORM, args, read + 2 * size_of(x), 5 * count)
    yield Workload(
        "add_rms_norm_quantize", ADD_RMS_NORM_QUANTIZE, args,
        read + size_of(x) + count + 4 * size.rows, 7 * count,
    )  # fmt: skip
    gate, up = (drawn(size.rows, size.inner, device=device, seed=s).to(dtype) for s in (4, 5))
    product = (gate, up, "silu")
    many = gate.numel()
    yield Workload("act_mul", ACT_MUL, product, 3 * size_of(gate), 5 * many)
    yield Workload(
        "act_mul_quantize", ACT_MUL_QUANTIZE, product,
        2 * size_of(gate) + many + 4 * size.rows, 7 * many,
    )  # fmt: skip


def cache(size: Size, device: str, dtype: torch.dtype) -> Iterator[Workload]:
    heads, shared, features, page = 32, 8, 128, 16
    rows = drawn(size.rows * shared, features, device=device).to(dtype)
    for name, plane in {"int8": PlaneScheme(8), "int4-g32": PlaneScheme(4, group=32)}.items():
        packed = len(rows) * (
            features * plane.bits // 8 + 3 * features // (plane.group or features)
        )
        args: tuple[Any, ...] = (rows, plane.spec)
        moved = size_of(rows) + packed
        yield Workload(f"kv_quantize {name}", KV_QUANTIZE, args, moved, 6 * rows.numel(), limit=0.0)
    needed = -(-size.keys // page)
    count = size.sequences * needed
    planes = tuple(
        drawn(count, page, shared, features, device=device, seed=s).to(dtype) for s in (1, 2)
    )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    last = torch.full((size.sequences,), (size.keys - 1) % page + 1, dtype=torch.int32)
    indptr = torch.arange(size.sequences + 1, dtype=torch.int32) * needed
    plan = PagedPlan(indptr, order, last, torch.zeros_like(last), page)
    queries = drawn(size.sequences, heads, features, device=device, seed=3).to(dtype)
    asked = torch.arange(size.sequences + 1)
    read = 2 * size.sequences * size.keys * shared * features * planes[0].element_size()
    products = 4 * size.sequences * heads * size.keys * features
    for name, parts in {"decode": None, "decode in parts of 32 pages": 32}.items():
        args = (queries, asked, planes, plan, AttentionRule(), parts)
        moved = read + 2 * size_of(queries)
        yield Workload(f"paged_attention, {name}", PAGED_ATTENTION, args, moved, products)


def scores(size: Size, device: str, dtype: torch.dtype) -> Iterator[Workload]:
    del dtype
    q, k = (drawn(1, 8, size.keys // 2, 128, device=device, seed=s) for s in (1, 2))
    for name, (of_q, of_k) in {"plain": (0, 0), "query": (1, 0), "both": (1, 1)}.items():
        coded = []
        for x, rest in ((q, of_q), (k, of_k)):
            scale = x.abs().amax(-1, keepdim=True) / 127
            codes = (x / scale).round().clamp(-127, 127)
            left = (x - codes * scale).half() if rest else None
            coded.append(Coded(codes.to(torch.int8), scale, left))
        moved = sum(size_of(*each) for each in coded) + (size_of(q) if of_k else 0)
        pairs = q.shape[1] * q.shape[2] * k.shape[2]
        # The terms run on other units; the roofline is that of the whole numbers.
        args = (*coded, q)
        yield Workload(
            f"int8_qk, {name}", INT8_QK, args, moved + 4 * pairs, 2 * pairs * 128, "int8", 1e-5
        )


def experts(size: Size, device: str, dtype: torch.dtype) -> Iterator[Workload]:
    outputs = size.width // 2
    weight = drawn(size.experts, outputs, size.width, device="cpu", seed=1) * 0.05
    stack = ExpertStack(weight, Recipe.named("int4-g32").weights).to(device)
    for tokens in (1, min(size.rows, 64)):
        x = drawn(tokens, size.width, device=device, seed=2).to(dtype)
        ids = (torch.arange(tokens * 2).view(tokens, 2) * 3 % size.experts).to(device)
        touched = len(ids.unique())
        moved = stack.num_bytes * touched // size.experts + size_of(x) + 2 * tokens * 2 * outputs
        operations = 2 * tokens * 2 * outputs * size.width
        args = (x, ids, stack, 16)
        yield Workload(f"moe_gemm, {tokens} tokens", MOE_GEMM, args, moved, operations)


def workloads(size: Size, device: str) -> Iterator[Workload]:
    """Yield them one by one, so that only one lies in memory."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    for make in (fused, cache, scores, experts):
        yield from make(size, device, dtype)


def _parts(found: Any) -> list[Tensor]:
    parts = [found] if isinstance(found, Tensor) else [part for part in found if part is not None]
    return [part for part in parts if part.numel()]


def error_of(work: Workload) -> float:
    """Return the largest error of its results against the float64 (or defining) back end."""
    twin = "reference" if "reference" in work.op.backends else "torch"
    errors = []
    made, right = (_parts(work.op.run(name, *work.args)) for name in ("triton", twin))
    for a, b in zip(made, right, strict=True):
        if not b.is_floating_point():
            # A code may go the other way where its value lies between two.
            apart = (a.int() - b.int()).abs()
            share = float((apart > 0).double().mean())
            errors.append(share if int(apart.max()) < 2 else math.inf)
            continue
        norm = float(b.double().norm())
        errors.append(float((a.double() - b.double()).norm()) / (norm or 1.0))
    return max(errors)


def report(work: Workload, ms: float, error: float, peak: Mapping[str, float]) -> dict[str, Any]:
    """Return one line: what was reached, and what share of what this device can."""
    least = 1e3 * max(work.num_bytes / peak["bytes"], work.operations / peak[work.arithmetic])
    by_memory = work.num_bytes / peak["bytes"] >= work.operations / peak[work.arithmetic]
    return {
        "what": work.what, "ms": ms, "gb_per_s": work.num_bytes / ms / 1e6,
        "tflop_per_s": work.operations / ms / 1e9, "roofline_ms": least,
        "share_of_roofline": least / ms, "bound_by": "memory" if by_memory else work.arithmetic,
        "error": repr(error), "limit": work.limit, "passed": error <= work.limit,
    }  # fmt: skip


def timed(
    clock: Timer, peak: Mapping[str, float], size: Size, device: str, limit_s: float
) -> Found:
    """Time every workload and look at its result; what no time is left for is said."""
    found: Found = [{"what": "peaks per second", "passed": True, **peak}]
    start = time.monotonic()
    for work in workloads(size, device):
        if time.monotonic() - start > limit_s:
            found.append({"what": work.what, "passed": True, "skipped": "no time left"})
            continue
        if reason := work.op.why_not("triton", *work.args):
            found.append({"what": work.what, "passed": False, "refused": reason})
            continue
        error = error_of(work)
        ms = clock.median(lambda w=work: w.op.run("triton", *w.args))  # type: ignore[misc]
        found.append(report(work, ms, error, peak))
    return found


def grid(device: str) -> Found:
    """Run a part of the conformance grid of every serving operator's Triton kernel."""
    found = []
    half = torch.bfloat16 if device == "cuda" else torch.float16
    for op in OPERATORS:
        cases = [
            replace(
                case,
                layouts=("poisoned tail",),
                dtypes=(half if half in case.dtypes else torch.float32,),
            )
            for case in all_cases()
            if case.op.name == op.name
        ]
        results = [r for r in run_cases(cases, device=device) if r.backend == "triton"]
        found.append(summary(op.name, results))
    return found


def summary(name: str, results: list[CaseResult]) -> dict[str, Any]:
    """Return one line: counts, the largest error as a share of what is allowed, a few failures."""
    ran = [r for r in results if r.status != "not applicable"]
    failed = [r for r in ran if r.status == "failed"]
    shares = [r.error / r.tolerance for r in ran if r.error is not None and r.tolerance]
    told = [f"{r.variant} {r.shape} {r.dtype} {r.layout}: {r.message}" for r in failed[:5]]
    return {
        "what": name, "passed": bool(ran) and not failed, "cells": len(ran), "failed": len(failed),
        "not_applicable": len(results) - len(ran),
        "largest_error_of_allowed": max(shares, default=0.0), "failures": told,
    }  # fmt: skip
