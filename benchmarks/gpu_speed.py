"""The last step of gpu.py: products against their rivals, in turns, caches flushed before each."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_layers import drawn, int4, w8a8
from torch import Tensor, nn

SPEED_SHAPES = ((576, 576), (1536, 576), (576, 1536), (4096, 4096), (11008, 4096))
SPEED_ROWS = (1, 16, 128, 1024)
REPEATS = 30


class Clock:
    """Milliseconds of calls on the device, caches flushed before each."""

    def __init__(self) -> None:
        self._flush = torch.zeros(2**28, dtype=torch.int8, device="cuda")

    def once(self, call: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))

    def median(self, call: Callable[[], object], repeats: int = 10) -> float:
        return statistics.median([self.once(call) for _ in range(repeats + 3)][3:])

    def interleaved(self, calls: dict[str, Callable[[Tensor], Any]], x: Tensor) -> dict[str, float]:
        """Return the median of every call on `x`; they take turns, the first three warm up."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(REPEATS + 3):
            for name, call in calls.items():
                times[name].append(self.once(partial(call, x)))
        return {name: statistics.median(each[3:]) for name, each in times.items()}


def peaks(clock: Clock) -> dict[str, float]:
    """Return what this device reaches: bytes and bfloat16 and int8 operations per second."""
    big = torch.zeros(2**29, dtype=torch.int8, device="cuda")
    other = torch.empty_like(big)
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    q = torch.randint(-127, 128, (8192, 8192), dtype=torch.int8, device="cuda")
    operations = 2 * 8192**3
    return {
        "bytes": 2 * len(big) / clock.median(lambda: other.copy_(big)) * 1e3,
        "bfloat16": operations / clock.median(lambda: a @ a.T) * 1e3,
        "int8": operations / clock.median(lambda: torch._int_mm(q, q.T)) * 1e3,
    }


def rivals(outputs: int, inputs: int) -> tuple[dict[str, Callable[[Tensor], Any]], list[str]]:
    """Return what multiplies one weight, and why a native product is missing."""
    plain = drawn(outputs, inputs, device="cuda").bfloat16()
    eight, four = w8a8(outputs, inputs, "cuda"), int4(outputs, inputs, "cuda", "int4-g64")
    eight.bias = four.bias = None
    codes = eight.quantized().codes.T
    calls: dict[str, Callable[[Tensor], Any]] = {
        "bfloat16": lambda x: nn.functional.linear(x, plain),
        "w8a8 triton": eight,
        "int4 triton": four,
    }
    missing = []
    if outputs % 8 == 0 and inputs % 64 == 0:
        pack = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device="cuda")
        pairs = torch.ones(inputs // 64, outputs, 2, device="cuda", dtype=torch.bfloat16)
        packed = torch.ops.aten._convert_weight_to_int4pack(pack, 8 if inputs % 128 == 0 else 2)
        calls["int4 native"] = lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, 64, pairs)
    else:
        missing.append(f"int4 native: {outputs} × {inputs} doesn't fit its tiles")
    calls["int8 native, cast included"] = lambda x: torch._int_mm(x.to(torch.int8), codes)
    return calls, missing


def least_ms(name: str, rows: int, outputs: int, inputs: int, peak: dict[str, float]) -> float:
    """Return the roofline's time: the longer of memory and arithmetic."""
    size = {"bfloat16": 2.0, "w8a8": 1.0, "int8": 1.0, "int4": 0.5 + 4 / 64}[
        name.split(maxsplit=1)[0]
    ]
    moved = outputs * inputs * size + 2 * rows * (inputs + outputs)
    kind = "int8" if size == 1.0 else "bfloat16"
    return 1e3 * max(moved / peak["bytes"], 2 * rows * outputs * inputs / peak[kind])


def speed(device: str, limit_s: float) -> list[dict[str, Any]]:
    """Time all rivals in turns. torch._int_mm needs more than 16 rows on a GPU."""
    assert device == "cuda"
    clock = Clock()
    found: list[dict[str, Any]] = []
    peak = peaks(clock)
    found.append({"what": "peaks per second", "passed": True, **peak})
    start = time.monotonic()
    for outputs, inputs in SPEED_SHAPES:
        calls, missing = rivals(outputs, inputs)
        for rows in SPEED_ROWS:
            if time.monotonic() - start > limit_s:
                found.append(
                    {
                        "what": f"{outputs} × {inputs}, {rows} rows",
                        "passed": True,
                        "skipped": "no time left",
                    }
                )
                continue
            x = drawn(rows, inputs, device="cuda").bfloat16()
            usable = {
                n: c for n, c in calls.items() if rows > 16 or n != "int8 native, cast included"
            }
            medians = clock.interleaved(usable, x)
            least = {n: least_ms(n, rows, outputs, inputs, peak) for n in medians}
            found.append({
                "what": f"{outputs} × {inputs}, {rows} rows", "passed": True, "missing": missing,
                "ms": medians,
                "ratio_to_bfloat16": {n: medians["bfloat16"] / each for n, each in medians.items()},
                "share_of_roofline": {n: least[n] / each for n, each in medians.items()},
            })  # fmt: skip
    return found
