"""Where a quantized operator is slower than what it replaces is said, not left to be looked up."""

import math

import pytest

from quantwatch.kernel_lab.speed_table import slower_notes, speeds_table
from quantwatch.kernel_lab.tables.model import to_json, to_markdown
from quantwatch.store.kernels import KernelSpeed


def speed(rows: int, ratio: float, *, high: float | None = None, op: str = "a") -> KernelSpeed:
    return KernelSpeed(
        operator=op,
        backend="aten",
        variant="int4-g64",
        shape=(rows, 32, 64),
        dtype="bfloat16",
        ratio=ratio,
        ratio_low=ratio,
        ratio_high=ratio if high is None else high,
        seconds=1e-6,
        baseline_seconds=ratio * 1e-6,
        rounds=5,
        threads=1,
        message="",
    )


CASES: dict[str, tuple[list[KernelSpeed], tuple[str, ...]]] = {
    "all faster": ([speed(1, 2.5), speed(4, 1.0)], ("nothing is slower than bfloat16 F.linear",)),
    "per operator": (
        [speed(1, 2.5), speed(16, 0.9), speed(128, 0.311), speed(1, 0.5, op="b")],
        (
            "slower than bfloat16: a aten int4-g64 at 16 × 64 → 32 (0.90), 128 × 64 → 32 (0.31)",
            "slower than bfloat16: b aten int4-g64 at 1 × 64 → 32 (0.50)",
        ),
    ),
    "not sure": (
        [speed(1, 0.97, high=1.02)],
        ("slower than bfloat16: a aten int4-g64 at 1 × 64 → 32 (0.97?)",),
    ),
    "not a number": (
        [speed(1, math.nan)],
        ("slower than bfloat16: a aten int4-g64 at 1 × 64 → 32 (nan?)",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_slower_is_named(name: str) -> None:
    """Catches a slower operator that passes as fast, in Markdown or in JSON."""
    speeds, notes = CASES[name]
    assert slower_notes(speeds) == notes
    table = speeds_table(speeds)
    assert all(note in to_markdown(table) for note in notes)
    assert set(notes) <= set(to_json(table)["notes"])
