"""Parsers of recorded files, and three classes on labelled kernels."""

import json
from math import inf
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from quantwatch_kernels.planning.ncu_csv import parse_ncu_csv
from quantwatch_kernels.planning.roofline import Ceilings, KernelTime, classify, merged
from quantwatch_kernels.planning.torch_trace import parse_torch_trace

DATA = Path(__file__).with_name("data")
RAW, DETAILS, GPU = (
    (DATA / name).read_text() for name in ("ncu_raw.csv", "ncu_details.csv", "torch_trace_gpu.json")
)
MEASURED = Ceilings(bytes_per_s=2e12, flops_per_s=50e12)


def test_raw_page() -> None:
    """Catches units taken for bytes and seconds, commas, the row of units, both tensor counts."""
    launches = parse_ncu_csv(RAW)
    assert launches == [
        KernelTime(
            "copy_kernel(float *, float *, int)", 1e-3, 1.8e9, 16_777_216, 1, "(65536, 1, 1)"
        ),
        KernelTime("sgemm_128x128", 2.5e-3, 2e8, 1e11 + 1000, 1, "(1024, 1, 1)"),
        KernelTime("tiny_add(float *)", 4 * 1e-6, 1e4, 32, 1, "(1, 1, 1)"),
        KernelTime("hgemm_tensor", 1e-3, 1e8, 45e9, 1, "(1024, 1, 1)"),
        KernelTime(
            "copy_kernel(float *, float *, int)", 1e-3, 1.8e9, 16_777_216, 1, "(65536, 1, 1)"
        ),
    ]
    copies = merged(launches)[1]
    assert copies == KernelTime(launches[0].name, 2e-3, 3.6e9, 2 * 16_777_216, 2, "(65536, 1, 1)")
    other = launches[0]._replace(shape="(1, 1, 1)")
    assert len(merged([*launches, other])) == 5


def test_what_a_program_prints_in_between() -> None:
    """Catches a line of the program's own that becomes a launch without metrics."""
    lines = DETAILS.splitlines()
    noisy = "\n".join([*lines[:5], "step 2, loss 3.1", "", "==WARNING== slow", *lines[5:]])
    assert parse_ncu_csv(noisy) == parse_ncu_csv(DETAILS)


def test_details_page() -> None:
    """Catches the percentage read as a rate, one count by two names added, ids of two processes."""
    norm, other = parse_ncu_csv(DETAILS)
    assert norm.name == "void norm<256>(float *, int)"
    assert norm.seconds == pytest.approx(500e-6)
    assert norm.num_bytes == pytest.approx(1600e9 * 500e-6)
    assert norm.flops == 1e6 + 2 * 2e6
    assert (other.seconds, other.num_bytes, other.flops) == pytest.approx((1e-3, 7.5e8, 20))


@pytest.mark.parametrize(
    ("index", "bound"), [(0, "memory"), (1, "compute"), (2, "latency"), (3, "compute")]
)
def test_recorded_kernels(index: int, bound: str) -> None:
    assert classify(parse_ncu_csv(RAW)[index], MEASURED).bound == bound


# One second; ceilings of 100 bytes and 1000 FLOPs per second: the ridge is at 10.
LABELLED = [
    ("streaming", 90, 100, "memory"),
    ("dense product", 50, 900, "compute"),
    ("both low", 59, 590, "latency"),
    ("high intensity, idle", 1, 500, "latency"),
    ("low intensity, idle", 50, 1, "latency"),
    ("on the ridge", 80, 800, "memory"),
    ("at the threshold", 60, 0, "memory"),
    ("no bytes at all", 0, 700, "compute"),
    ("nothing at all", 0, 0, "latency"),
]


@pytest.mark.parametrize(("name", "moved", "flops", "bound"), LABELLED)
def test_labelled(name: str, moved: float, flops: float, bound: str) -> None:
    """All of them right: two classes only, hard-coded peaks or intensity alone get some wrong."""
    ceilings = Ceilings(100.0, 1000.0)
    verdict = classify(KernelTime(name, 1.0, moved, flops), ceilings)
    assert verdict.bound == bound
    roof = min(1000.0, flops / moved * 100.0) if moved else 1000.0
    assert verdict.intensity == (flops / moved if moved else inf)
    if flops:
        assert verdict.roof_share == pytest.approx(flops / roof)


def test_the_ridge() -> None:
    assert MEASURED.ridge == 25


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (KernelTime("k", 0.0, 1, 1), "k: its time"),
        (KernelTime("k", 1.0, -1, 1), "k: bytes and FLOPs"),
        (KernelTime("k", 1.0, 3e12, 1), "k: 150% of the bandwidth"),
        (KernelTime("k", 1.0, 1, inf), "k: bytes and FLOPs"),
    ],
)
def test_bad_kernels(kernel: KernelTime, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        classify(kernel, MEASURED)


def test_a_cache_may_be_faster_than_memory() -> None:
    """Bytes that shapes allow aren't those that memory saw: more than its rate is no mistake there."""
    verdict = classify(KernelTime("k", 1.0, 3e12, 1), MEASURED, cached=True)
    assert verdict.bound == "memory"
    assert verdict.memory_share == pytest.approx(1.5)
    with pytest.raises(ValueError, match="ceilings are too low"):
        classify(KernelTime("k", 1.0, 1, 60e12), MEASURED, cached=True)


def test_bad_ceilings_and_threshold() -> None:
    with pytest.raises(ValueError, match="flops_per_s must be positive"):
        Ceilings(1.0, 0.0)
    with pytest.raises(ValueError, match="threshold"):
        classify(KernelTime("k", 1.0, 1, 1), MEASURED, 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no header"),
        ("==ERROR== no permission (ERR_NVGPUCTRPERM)", "no header"),
        (RAW.splitlines()[3], "no launch"),
        (RAW.replace("gpu__time_duration.sum", "x"), r"copy_kernel.*gpu__time_duration.sum"),
        (RAW.replace("dram__bytes.sum", "x"), "no DRAM bytes"),
        (RAW.replace("sass_thread", "x").replace("ops_path", "x"), "no instruction counts"),
        (RAW.replace("1,800.00", "1.800,00"), "1.800,00"),
        (RAW.replace("1,800.00", "n/a"), "n/a"),
        (RAW.replace("Mbyte", "Mibyte"), "Mibyte"),
        (DETAILS.replace("Gbyte/s", "%"), "norm.*no DRAM bytes"),
    ],
)
def test_bad_csv(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_ncu_csv(text)


def test_trace_of_a_gpu() -> None:
    """Catches launch times taken for kernel times, composites counted twice, and broadcasts."""
    trace = parse_torch_trace(GPU)
    product, added = (tuple(kernel) for kernel in trace.kernels)
    assert product == (
        "aten::mm",
        pytest.approx(4e-6),
        (64 * 128 + 128 * 32 + 64 * 32) * 2,
        2 * 64 * 32 * 128,
        1,
        "[64, 128]×[128, 32]",
    )
    assert added == (
        "aten::add",
        pytest.approx(2e-6),
        (2 * 64 * 32 + 32) * 4,
        64 * 32,
        1,
        "[64, 32]×[32]",
    )
    assert trace.unknown == {"aten::linear": 0.0, "aten::sort": pytest.approx(7e-6)}


def test_trace_of_this_torch(tmp_path: Path) -> None:
    """Catches names and fields that the installed profiler writes otherwise."""
    a, b = torch.randn(16, 24), torch.randn(24, 8)
    bias, batch = torch.randn(8), torch.randn(3, 16, 24)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        a @ b
        torch.addmm(bias, a, b)
        torch.bmm(batch, batch.mT)
        torch.nn.functional.silu(a) * a
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    trace = parse_torch_trace(path.read_text())
    work = {kernel.name: (kernel.num_bytes, kernel.flops) for kernel in trace.kernels}
    assert work["aten::mm"] == ((16 * 24 + 24 * 8 + 16 * 8) * 4, 2 * 16 * 8 * 24)
    assert work["aten::addmm"] == ((16 * 24 + 24 * 8 + 8 + 16 * 8) * 4, 2 * 16 * 8 * 24)
    assert work["aten::bmm"] == ((2 * 3 * 16 * 24 + 3 * 16 * 16) * 4, 2 * 3 * 16 * 16 * 24)
    assert work["aten::silu"] == (2 * 16 * 24 * 4, 16 * 24)
    assert work["aten::mul"] == (3 * 16 * 24 * 4, 16 * 24)
    assert "aten::matmul" in trace.unknown
    assert all(kernel.seconds > 0 for kernel in trace.kernels)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON"),
        ("[]", "no JSON"),
        ("{}", "no JSON"),
        ('{"traceEvents": 3}', "no JSON"),
        ('{"traceEvents": [{"cat": "cpu_op"}]}', "record_shapes"),
        (json.dumps({"traceEvents": []}), "record_shapes"),
    ],
)
def test_bad_traces(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_torch_trace(text)
