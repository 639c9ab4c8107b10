"""Serving kernels compile for GPUs that this machine doesn't have."""

from pathlib import Path

import pytest
from tests.kernels.compiling import compiled


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    """Catches what the interpreter accepts and the compiler doesn't; sums of codes that aren't
    exact (bug log 15) or are float16 (bug log 14); float32 products that became TF32."""
    found = compiled(
        "tests.kernels.serve.triton.compile_serve", capability, tmp_path, "fp32", "fp16", "bf16"
    )
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
