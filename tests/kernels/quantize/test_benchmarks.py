"""The benchmark scripts run; what they compute from times is right."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_ratio_is_weighted_by_time() -> None:
    """Catches a mean of ratios, in which a small layer counts as much as a large one."""
    made = module("kernels_quantize").ratio(
        np.tile([8e-3] + [1e-3] * 6, (30, 1)), np.tile([2e-3] + [1e-3] * 6, (30, 1))
    )
    assert made["ratio"] == 1.75
    assert made["interval"] == [1.75, 1.75]
    assert made["per_layer"]["q_proj"] == 4.0


def test_ratio_has_an_interval() -> None:
    """Catches an interval that doesn't hold what the spread allows."""
    times = np.random.default_rng(0).normal(1e-3, 2e-4, (40, 7))
    low, high = module("kernels_quantize").ratio(times, times[::-1])["interval"]
    assert low < 1 < high


def test_a_broken_promise_is_told() -> None:
    """Catches a figure below its promise that is printed as kept."""
    made = module("kernels_quantize").promises({"16": {"w8a8": {"ratio": 1.29}}})
    assert [(each["provider"], each["kept"]) for each in made] == [("w8a8", False)]


@pytest.mark.slow
def test_cpu_ratios_run() -> None:
    """Catches a provider that can't do the layers of a block, or falls back in them."""
    command = [
        sys.executable,
        str(BENCHMARKS / "kernels_quantize.py"),
        "--repeats",
        "2",
        "--rows",
        "1",
        "20",
    ]
    printed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert printed["machine"]["fallbacks"] == []
    assert set(printed["rows"]) == {"1", "20"}
    assert printed["rows"]["1"]["bfloat16"]["ratio"] == 1.0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_gpu_script_says_that_there_is_no_device() -> None:
    """Catches a script that can't be imported here, or figures that came from nowhere."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout) == {"status": "no CUDA device"}
