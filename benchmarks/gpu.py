"""What only a GPU can tell about the Triton kernels, in at most ten minutes. Prints JSON.

Each step is a process of its own with its own time limit, so that a kernel that hangs or corrupts
its context costs one step. In this order:

- golden: every kernel in bfloat16, float16 and float32 against float64 on a copy in main memory
  (the interpreter multiplies no bfloat16);
- overflow: float16 inputs whose partial sums pass 65504: a float16 accumulator gives infinity;
- poison: NaN and 127 around every input, a guard behind every output;
- rows: a row alone against the row among 64, bit for bit;
- serve: the conformance grid of every serving operator's kernel;
- speed: against bfloat16 `F.linear` and the native int4 and int8 products, caches flushed, as a
  ratio and as a share of the roofline that this device reached itself in a copy and in a product;
- serve_speed: each serving operator's time, bytes and operations per second, share of the roofline,
  and error against float64.

`--device cpu` runs all but the last two in the interpreter, to try this script out; without a GPU
and without it, it says so and stops.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import gpu_serve
import torch
from gpu_layers import drawn, int4, w8a8
from gpu_speed import Clock, peaks, speed
from torch import Tensor

from quantwatch_kernels.numerics import relative_rmse
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.hadamard import Hadamard
from quantwatch_kernels.quantize.int4_linear import INT4_LINEAR
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.quantize.row_codes import quantize_rows
from quantwatch_kernels.quantize.row_ops import HADAMARD, QUANTIZE_ROWS
from quantwatch_kernels.quantize.triton.available import triton_why_not
from quantwatch_kernels.quantize.w8a8_linear import W8A8_LINEAR, W8A8Linear

LIMITS_S = {
    "golden": 110, "overflow": 30, "poison": 70, "rows": 50, "serve": 120, "speed": 130,
    "serve_speed": 85,
}  # fmt: skip
TIMED = ("speed", "serve_speed")
RMSE = {torch.float32: 7e-7, torch.float16: 6e-4, torch.bfloat16: 5e-3}
SHAPES = ((1, 576, 576), (17, 192, 576), (65, 576, 1536), (5, 37, 91))
"""(rows, outputs, inputs)."""
GUARD, SENTINEL = 97, 85
Found = list[dict[str, Any]]


def dtypes(device: str) -> list[torch.dtype]:
    """The interpreter multiplies no bfloat16."""
    return [torch.float32, torch.float16] + ([torch.bfloat16] if device == "cuda" else [])


def checked(what: str, error: float, limit: float, **more: Any) -> dict[str, Any]:
    """One line of a step: NaN fails."""
    return {"what": what, "error": repr(error), "limit": limit, "passed": error <= limit, **more}


def products(device: str) -> Iterator[tuple[str, Any, Any, tuple[int, int, int]]]:
    """Every linear layer with its operator."""
    for shape in SHAPES:
        yield f"w8a8 {shape}", W8A8_LINEAR, w8a8(*shape[1:], device), shape
        for name in ("uint4-g64", "int4-g32"):
            yield f"{name} {shape}", INT4_LINEAR, int4(*shape[1:], device, name), shape


def golden(device: str) -> Found:
    """Compare with float64 on the CPU copy of the same layer."""
    found = []
    for dtype in dtypes(device):
        for what, op, layer, (rows, _, inputs) in products(device):
            x = drawn(rows, inputs, device=device).to(dtype)
            y = layer(x).cpu()
            layer.to("cpu")
            expected = op.run("reference", x.double().cpu(), layer, layer.bias)
            found.append(checked(f"{what} {dtype}", relative_rmse(y, expected), RMSE[dtype]))
        for width in (64, 576, 1536, 4096):
            rotation, x = (
                Hadamard(width, seed=1).to(device),
                drawn(3, width, device=device).to(dtype),
            )
            y = HADAMARD.run("triton", x, rotation).cpu()
            expected = x.double().cpu() @ rotation.matrix().cpu()
            found.append(
                checked(f"hadamard {width} {dtype}", relative_rmse(y, expected), RMSE[dtype])
            )
        x = drawn(7, 1537, device=device).to(dtype)
        codes, scales = QUANTIZE_ROWS.run("triton", x)
        right = quantize_rows(x.cpu())
        same = torch.equal(codes.cpu(), right.codes) and torch.equal(scales.cpu(), right.scales)
        found.append(checked(f"quantize_rows {dtype}", 0.0 if same else 1.0, 0.0))
    return found


def overflow(device: str) -> Found:
    """2047 terms of +1000 and 2048 of −1000: partial sums of 2e6 that end at −1000."""
    weight = torch.ones(1, 4096)
    weight[0, 2048:], weight[0, 0] = -1.0, 0.0
    x = torch.full((1, 4096), 1000.0, dtype=torch.float16, device=device)
    made = quantize_weight(weight, Recipe.named("int4-channel").weights)
    four = PackedLinear(made, None, INT4_LINEAR, "triton").to(device)
    eight = W8A8Linear(
        quantize_weight(weight, Recipe.named("int8-channel").weights), None, backend="triton"
    )
    layers = {"int4": four, "w8a8": eight.to(device)}
    return [checked(n, abs(layer(x).item() / -1000 - 1), 2e-3) for n, layer in layers.items()]


def surrounded(x: Tensor) -> Tensor:
    """Put a matrix inside a larger one of NaN."""
    buffer = torch.full(
        (x.shape[0] + 70, x.shape[1] + 133), torch.nan, dtype=x.dtype, device=x.device
    )
    inner = buffer[: x.shape[0], : x.shape[1]]
    inner.copy_(x)
    return inner


@contextmanager
def guarded() -> Iterator[list[tuple[Tensor, int]]]:
    """Let `torch.empty` return the start of longer buffers."""
    buffers: list[tuple[Tensor, int]] = []

    def empty(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        count = torch.Size(shape).numel()
        buffer = torch.full((count + GUARD,), SENTINEL, dtype=dtype, device=device)
        buffers.append((buffer, count))
        return buffer[:count].view(*shape)

    with mock.patch.object(torch, "empty", empty):
        yield buffers


def poison(device: str) -> Found:
    """Compare poisoned with plain inputs bit for bit, and look behind every output."""
    calls: list[tuple[str, Callable[[Tensor], Tensor], tuple[int, int]]] = []
    for what, _, layer, (rows, _, inputs) in products(device):
        calls.append((what, layer, (rows, inputs)))
    for width in (12, 576):
        rotation = Hadamard(width, seed=1).to(device)
        calls.append(
            (f"hadamard {width}", lambda x, r=rotation: HADAMARD.run("triton", x, r), (3, width))
        )  # type: ignore[misc]
    calls.append(("quantize_rows", lambda x: QUANTIZE_ROWS.run("triton", x)[0], (5, 1537)))
    found = []
    for what, call, shape in calls:
        x = drawn(*shape, device=device).half()
        plain = call(x)
        with guarded() as buffers:
            same = torch.equal(call(surrounded(x)), plain)
        inside = all(bool((buffer[count:] == SENTINEL).all()) for buffer, count in buffers)
        found.append(
            checked(what, 0.0 if same and inside and buffers else 1.0, 0.0, writes_inside=inside)
        )
    return found


def rows_alone(device: str) -> Found:
    """Compare the first row alone, and the first 16, with the rows among 64."""
    found = []
    for dtype in dtypes(device):
        for what, layer in (("w8a8", w8a8(576, 576, device)), ("int4", int4(576, 576, device))):
            x = drawn(64, 576, device=device).to(dtype)
            every = layer(x)
            for few in (1, 16):
                difference = relative_rmse(layer(x[:few]).cpu(), every[:few].cpu())
                found.append(checked(f"{what} {few} of 64 {dtype}", difference, 0.0))
    return found


def serve_speed(device: str, limit_s: float) -> Found:
    """Time the serving operators against the ceilings of this run."""
    assert device == "cuda"
    clock = Clock()
    return gpu_serve.timed(clock, peaks(clock), gpu_serve.LARGE, device, limit_s)


STEPS: dict[str, Callable[[str], Found]] = {
    "golden": golden, "overflow": overflow, "poison": poison, "rows": rows_alone,
    "serve": gpu_serve.grid,
    "speed": lambda device: speed(device, LIMITS_S["speed"] - 40),
    "serve_speed": lambda device: serve_speed(device, LIMITS_S["serve_speed"] - 30),
}  # fmt: skip


def run_step(name: str, device: str) -> dict[str, Any]:
    """Run a step in a process of its own."""
    started = time.monotonic()
    command = [sys.executable, __file__, "--step", name, "--device", device]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMITS_S[name], check=False
        )
    except subprocess.TimeoutExpired:
        return {"step": name, "status": f"not finished in {LIMITS_S[name]} s"}
    seconds = round(time.monotonic() - started, 1)
    if done.returncode:
        return {
            "step": name,
            "status": "crashed",
            "seconds": seconds,
            "stderr": done.stderr[-2000:],
        }
    found = json.loads(done.stdout.splitlines()[-1])
    status = "passed" if all(each["passed"] for each in found) else "failed"
    return {"step": name, "status": status, "seconds": seconds, "results": found}


def main() -> int:
    """Print what the command line asks for; 0 if all steps passed, 2 without a device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--step", choices=tuple(STEPS), help="run one step in this process")
    parser.add_argument("--steps", nargs="+", choices=tuple(STEPS), default=list(STEPS))
    given = parser.parse_args()
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        given.steps = [step for step in given.steps if step not in TIMED]
    elif not torch.cuda.is_available():
        print(json.dumps({"status": "no CUDA device"}))
        return 2
    if reason := triton_why_not(torch.empty(0, device=given.device)):
        print(json.dumps({"status": reason}))
        return 2
    if given.step:
        with torch.inference_mode():
            print(json.dumps(STEPS[given.step](given.device)))
        return 0
    steps = []
    for step in given.steps:
        steps.append(run_step(step, given.device))
        print(f"{step}: {steps[-1]['status']}", file=sys.stderr, flush=True)
    device = torch.cuda.get_device_name() if given.device == "cuda" else "interpreter"
    printed = {"device": device, "torch": torch.__version__, "steps": steps}
    print(json.dumps(printed, indent=1))
    return 0 if all(each["status"] == "passed" for each in steps) else 1


if __name__ == "__main__":
    sys.exit(main())
