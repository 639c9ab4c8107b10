"""Triton kernels compile for GPUs that this machine doesn't have."""

from pathlib import Path

import pytest
from tests.kernels.compiling import compiled


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    """Catches what the interpreter accepts and the compiler doesn't; sums that aren't exact (bug
    log 15) or are float16 (bug log 14), from the instructions themselves."""
    found = compiled(
        "tests.kernels.quantize.triton.compile_kernels", capability, tmp_path, "fp16", "bf16"
    )
    assert set(found) == {
        f"{k} {d}" for k in ("rows", "int8", "int4", "hadamard") for d in ("fp16", "bf16")
    }
    for dtype, short in (("fp16", "f16"), ("bf16", "bf16")):
        assert all(f".f32.{short}.{short}" in each for each in found[f"int4 {dtype}"])
        assert found[f"int4 {dtype}"]
        assert all(".s32.s8.s8" in each for each in found[f"int8 {dtype}"])
        assert found[f"int8 {dtype}"]
        assert found[f"hadamard {dtype}"] == [], "float32 products must not become TF32"
