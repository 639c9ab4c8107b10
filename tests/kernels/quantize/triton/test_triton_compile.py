"""Triton kernels compile for GPUs that this machine doesn't have, and read nothing undefined."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantwatch_kernels.quantize import triton

KERNELS = Path(triton.__file__).parent


def loads(file: Path) -> list[ast.Call]:
    calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    return [call for call in calls if ast.unparse(call.func) == "tl.load"]


@pytest.mark.parametrize("name", ["rows", "int8_matmul", "int4_matmul", "hadamard"])
def test_every_masked_load_says_what_is_outside(name: str) -> None:
    """Catches lanes that the interpreter fills with zeros and a GPU with anything (bug log 26)."""
    found = loads(KERNELS / f"{name}.py")
    assert found
    for call in found:
        assert {"mask", "other"} <= {keyword.arg for keyword in call.keywords}, ast.unparse(call)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    """Catches what the interpreter accepts and the compiler doesn't; sums that aren't exact (bug
    log 15) or are float16 (bug log 14), from the instructions themselves."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(script), str(capability), "fp16", "bf16"],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {
        f"{k} {d}" for k in ("rows", "int8", "int4", "hadamard") for d in ("fp16", "bf16")
    }
    for dtype, short in (("fp16", "f16"), ("bf16", "bf16")):
        assert all(f".f32.{short}.{short}" in each for each in found[f"int4 {dtype}"])
        assert found[f"int4 {dtype}"]
        assert all(".s32.s8.s8" in each for each in found[f"int8 {dtype}"])
        assert found[f"int8 {dtype}"]
        assert found[f"hadamard {dtype}"] == [], "float32 products must not become TF32"
