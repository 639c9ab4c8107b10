"""benchmarks/gpu_serve.py with a clock and ceilings that are given: figures, errors, refusals."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantwatch_kernels.registry import Op

pytest.importorskip("triton", reason="triton is not installed")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PEAK = {"bytes": 4e12, "bfloat16": 8e14, "int8": 16e14}
NAMES = {
    "add_rms_norm", "add_rms_norm_quantize", "act_mul", "act_mul_quantize", "kv_quantize int8",
    "kv_quantize int4-g32", "paged_attention, decode", "paged_attention, decode in parts of 32 pages",
    "int8_qk, plain", "int8_qk, query", "int8_qk, both", "moe_gemm, 1 tokens", "moe_gemm, 3 tokens",
}  # fmt: skip
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")


class FakeClock:
    """Every call takes 2 ms."""

    def __init__(self) -> None:
        self.calls = 0

    def median(self, call: Callable[[], object], repeats: int = 10) -> float:
        del repeats
        call()
        self.calls += 1
        return 2.0


@pytest.fixture
def gpu_serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("gpu_serve")
    for name in ("gpu", "gpu_serve", "gpu_layers", "gpu_speed"):
        sys.modules.pop(name, None)


def test_every_operator_is_timed(gpu_serve: Any) -> None:
    """Catches an operator that is left out, an error that isn't looked at, a fallback's time."""
    clock = FakeClock()
    peaks, *found = gpu_serve.timed(clock, PEAK, gpu_serve.SMALL, "cpu", 600)
    assert peaks == {"what": "peaks per second", "passed": True, **PEAK}
    assert {each["what"] for each in found} == NAMES
    assert clock.calls == len(found)
    for each in found:
        assert each["passed"], each
        assert each["ms"] == 2.0
        assert 0 <= float(each["error"]) <= each["limit"]
        assert each["gb_per_s"] > 0
        assert 0 < each["share_of_roofline"] < 1
    assert {work.op.name for work in gpu_serve.workloads(gpu_serve.SMALL, "cpu")} == {
        op.name for op in gpu_serve.OPERATORS
    }


def test_figures_by_hand(gpu_serve: Any) -> None:
    """Catches GB taken for GiB, milliseconds for seconds, and the shorter of the two bounds."""
    op: Op[..., Any] = Op("none")
    work = gpu_serve.Workload("w", op, (), 8_000_000, 80_000_000_000, "bfloat16", 0.01)
    line = gpu_serve.report(work, 0.5, 0.004, PEAK)
    assert line["gb_per_s"] == pytest.approx(16.0)
    assert line["tflop_per_s"] == pytest.approx(160.0)
    assert line["roofline_ms"] == pytest.approx(0.1)  # 8e10 ÷ 8e14 s, longer than 8e6 ÷ 4e12
    assert (line["share_of_roofline"], line["bound_by"]) == (pytest.approx(0.2), "bfloat16")
    assert line["passed"]
    moved = gpu_serve.report(replace(work, num_bytes=4_000_000_000), 2.0, torch.nan, PEAK)
    assert (moved["share_of_roofline"], moved["bound_by"]) == (pytest.approx(0.5), "memory")
    assert not moved["passed"]


def test_bytes_and_operations_by_hand(gpu_serve: Any) -> None:
    """Catches what is counted twice, or not at all."""
    works = {work.what: work for work in gpu_serve.workloads(gpu_serve.SMALL, "cpu")}
    assert works["add_rms_norm"].num_bytes == 2 * (4 * 3 * 64 + 64)
    assert works["act_mul_quantize"].num_bytes == 3 * 96 * (2 + 2 + 1) + 3 * 4
    paged = works["paged_attention, decode"]
    assert paged.num_bytes == 2 * 2 * (2 * 19 * 8 * 128) + 2 * 2 * (2 * 32 * 128)
    assert paged.operations == 2 * 2 * (2 * 32 * 19 * 128)
    assert works["kv_quantize int8"].num_bytes == 24 * (128 * 2 + 128 + 2 + 1)
    assert works["kv_quantize int4-g32"].num_bytes == 24 * (128 * 2 + 64 + 4 * 3)
    assert works["int8_qk, plain"].operations == 2 * 8 * 9 * 9 * 128


def test_wrong_results_and_no_time(gpu_serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a figure that counts as passed whatever came out, and a step that runs on and on."""
    monkeypatch.setattr(gpu_serve, "error_of", lambda _work: 0.5)
    _, *found = gpu_serve.timed(FakeClock(), PEAK, gpu_serve.SMALL, "cpu", 600)
    assert not any(each["passed"] for each in found)
    _, *skipped = gpu_serve.timed(FakeClock(), PEAK, gpu_serve.SMALL, "cpu", -1)
    assert {each["skipped"] for each in skipped} == {"no time left"}


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_a_wrong_kernel_has_an_error(gpu_serve: Any) -> None:
    """Catches an error that can't be anything but small."""
    op: Op[..., Any] = Op("twice")
    op.register("triton")(twice)
    op.register("reference")(torch.clone)
    work = gpu_serve.Workload("twice", op, (torch.ones(3),), 1, 1)
    assert gpu_serve.error_of(work) == pytest.approx(1.0)
    codes = replace(work, args=(torch.ones(3, dtype=torch.int8),), limit=0.0)
    assert gpu_serve.error_of(codes) == 1.0


def test_a_grid_that_fails_is_told(gpu_serve: Any) -> None:
    """Catches a grid with nothing in it that passes."""
    assert not gpu_serve.summary("none", [])["passed"]
    case = next(c for c in gpu_serve.all_cases() if c.op.name == "act_mul")
    results = list(gpu_serve.run_cases([replace(case, tolerance=lambda _b, _d: 0.0)], quick=True))
    line = gpu_serve.summary("act_mul", [r for r in results if r.backend == "triton"])
    assert not line["passed"]
    assert 0 < line["failed"] <= line["cells"]
    assert line["failures"]


def test_all_steps_fit_ten_minutes(gpu_serve: Any) -> None:
    """Catches a limit that was raised without another being lowered."""
    del gpu_serve
    gpu = importlib.import_module("gpu")
    assert set(gpu.LIMITS_S) == set(gpu.STEPS)
    assert sum(gpu.LIMITS_S.values()) < 600
