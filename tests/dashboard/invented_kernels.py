"""Batches of kernel cases and speeds as the commands write them."""

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from quantwatch.store import kernels
from quantwatch.store.kernels import KernelBatch, KernelCase, KernelSpeed, Kind
from quantwatch.store.session import open_database

START = datetime(2026, 11, 28, 2, tzinfo=UTC)
EVIL = "<script>alert(1)</script> [x](javascript:alert(1)) <b>off</b>"
CASE = KernelCase(
    "int4_linear", "aten", "int4-g64", (16, 64, 576), "bfloat16", "contiguous", "passed",
    2e-4, 2e-3, "", (),
)  # fmt: skip
FAILS = replace(CASE, backend="triton", status="failed", error=0.03, message=EVIL)
SPEED = KernelSpeed(
    "int4_linear", "aten", "int4-g64", (16, 64, 576), "bfloat16",
    1.3, 1.2, 1.4, 1e-3, 1.3e-3, 40, 1, "",
)  # fmt: skip


def batch(name: str, kind: Kind = "test", day: int = 0, device: str = "cpu") -> KernelBatch:
    """Return a batch of a day."""
    begin = START + timedelta(days=day)
    return KernelBatch(
        name, kind, device, "51a9e00c12345", {"cpu": "x", "note": EVIL}, begin,
        begin + timedelta(minutes=2), 2, 1, 1,
    )  # fmt: skip


def cases() -> Iterator[KernelCase]:
    """Yield what passes, what fails, what does not apply and what has an operator of later days."""
    yield CASE
    yield replace(CASE, dtype="float32", error=math.nan, status="failed", message="NaN")
    yield FAILS
    yield replace(CASE, backend="by_rows", status="not applicable", message="65 inputs",
                  fallbacks=(("aten", "65 inputs", 3),))  # fmt: skip
    yield replace(CASE, operator="paged_attention", backend=EVIL[:8], variant="")
    yield replace(CASE, operator="tap_statistics", backend="aten", variant="", error=0.0)


def fill_kernels(url: str) -> None:
    """Write two batches of tests, one of a single operator and newer, and one of speeds."""
    database = open_database(url)
    try:
        kernels.insert_cases(database, batch("01A"), list(cases()))
        newer = replace(CASE, operator="paged_attention", variant="", error=4e-4)
        kernels.insert_cases(database, batch("01B", day=1), [newer])
        slow = replace(SPEED, shape=(128, 64, 576), ratio=0.8, ratio_low=0.7, ratio_high=0.9,
                       message=f"aten: {EVIL}")  # fmt: skip
        kernels.insert_speeds(database, batch("01C", "bench", 1), [SPEED, slow])
    finally:
        database.close()
