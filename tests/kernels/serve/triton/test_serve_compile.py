"""Serving kernels compile for GPUs that this machine doesn't have, and read nothing undefined."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantwatch_kernels.serve import triton

KERNELS = Path(triton.__file__).parent
FILES = ("act_mul", "int8_qk", "kv_quantize", "moe_gemm", "paged_attention", "rms_norm")


@pytest.mark.parametrize("name", FILES)
def test_every_load_says_what_is_outside(name: str) -> None:
    """Catches lanes that the interpreter fills with zeros and a GPU with anything (bug log 26)."""
    tree = ast.parse((KERNELS / f"{name}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) == "tl.load"]
    assert loads
    for call in loads:
        assert {"mask", "other"} <= {keyword.arg for keyword in call.keywords}, ast.unparse(call)


def test_every_kernel_is_named_here() -> None:
    """Catches a kernel that is added without these tests."""
    assert {path.stem for path in KERNELS.glob("*.py")} == {"__init__", "parts", *FILES}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    """Catches what the interpreter accepts and the compiler doesn't; sums of codes that aren't
    exact (bug log 15) or are float16 (bug log 14); float32 products that became TF32."""
    script = Path(__file__).with_name("compile_serve.py")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(script), str(capability), "fp32", "fp16", "bf16"],
        env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 30
    for dtype, short in (("fp16", "f16"), ("bf16", "bf16")):
        for kernel in ("paged", "experts"):
            used = found[f"{kernel} {dtype}"]
            assert used, kernel
            assert all(f".f32.{short}.{short}" in each for each in used), used
        coded = found[f"experts codes {dtype}"] + found[f"scores {dtype}"]
        assert coded
        assert all(".s32.s8.s8" in each for each in coded), coded
        both = found[f"scores, both {dtype}"]
        assert sum(".s32.s8.s8" in each for each in both) == 1
        assert all(".s32.s8.s8" in each or ".f32.f16.f16" in each for each in both), both
    assert found["paged fp32"] == [], "float32 products must not become TF32"
    assert found["experts fp32"] == []
