"""How fast quantized linear layers are beside bfloat16 `F.linear`, as ratios. Prints JSON.

The layers of one decoder block of SmolLM2-135M, by number of rows (tokens). All providers take
turns within each repeat, in a new order, so that weights come from memory as they do in a model,
and the machine's moods hit them alike. Quantizing activations is included. A ratio is (sum over
layers of the median time of `F.linear`) / (the same of the provider), so a layer weighs as much as
it takes; its interval is a bootstrap over repeats. Absolute times are for information: on a shared
machine they move by a factor of two.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantwatch_kernels.quantize import native_rows
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.api import linear_op
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.quantize.w4a8_linear import W4A8Linear, progressive_weight
from quantwatch_kernels.quantize.w8a8_linear import W8A8Linear
from quantwatch_kernels.registry import fallbacks

LAYERS = {
    "q_proj": (576, 576), "k_proj": (192, 576), "v_proj": (192, 576), "o_proj": (576, 576),
    "gate_proj": (1536, 576), "up_proj": (1536, 576), "down_proj": (576, 1536),
}  # fmt: skip
ROWS = (1, 4, 8, 16, 32, 128)
PROMISES = (("w8a8", 16, 1.3), ("w8a8", 128, 1.5), ("int4-g64", 1, 1.7))
BASELINE = "bfloat16"
Call = Callable[[Tensor], Tensor]


def packed(weight: Tensor, recipe: str, backend: str) -> PackedLinear:
    """Return a layer with codes of its own: shared ones would be hot in another provider's turn."""
    spec = Recipe.named(recipe).weights
    return PackedLinear(quantize_weight(weight, spec), None, linear_op(spec), backend)


def providers(rows: int, columns: int) -> dict[str, Call]:
    """Return what multiplies one weight [rows, columns], the baseline first."""
    weight = torch.randn(rows, columns) / columns**0.5
    plain = weight.bfloat16()
    codes = quantize_weight(weight, Recipe.named("int8-channel").weights)
    return {
        BASELINE: lambda x: nn.functional.linear(x, plain),
        "w8a8": W8A8Linear(codes, None, backend="aten"),
        "w4a8": W4A8Linear(progressive_weight(weight, 64), None, backend="aten"),
        "int4-g64": packed(weight, "int4-g64", "aten"),
        "int4-g64 by rows": packed(weight, "int4-g64", "by_rows"),
        "int8-channel": packed(weight, "int8-channel", "aten"),
        "int8-channel by rows": packed(weight, "int8-channel", "by_rows"),
    }


def measure(
    layers: list[dict[str, Call]], rows: int, repeats: int
) -> dict[str, NDArray[np.float64]]:
    """Return seconds [repeats, layers] of every provider."""
    names = list(layers[0])
    inputs = [torch.randn(rows, columns).bfloat16() for _, columns in LAYERS.values()]
    times = {name: np.zeros((repeats, len(layers))) for name in names}
    for repeat in range(-2, repeats):  # two rounds to warm up and to lay out weights
        for name in random.sample(names, len(names)):
            for place, (calls, x) in enumerate(zip(layers, inputs, strict=True)):
                start = time.perf_counter()
                calls[name](x)
                if repeat >= 0:
                    times[name][repeat, place] = time.perf_counter() - start
    return times


def ratio(
    baseline: NDArray[np.float64], provider: NDArray[np.float64], seed: int = 0
) -> dict[str, Any]:
    """Return the ratio of block times, its 95 % bootstrap interval, and the medians themselves."""
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(baseline), (1000, len(baseline)))
    sums = [np.median(times[draws], axis=1).sum(1) for times in (baseline, provider)]
    low, high = np.quantile(sums[0] / sums[1], [0.025, 0.975])
    block = np.median(provider, axis=0).sum()
    layers = np.median(baseline, axis=0) / np.median(provider, axis=0)
    quartiles = np.quantile(provider.sum(1), [0.25, 0.75])
    return {
        "ratio": round(float(np.median(baseline, axis=0).sum() / block), 3),
        "interval": [round(float(low), 3), round(float(high), 3)],
        "block_us": round(float(block) * 1e6, 1),
        "block_us_quartiles": [round(float(each) * 1e6, 1) for each in quartiles],
        "per_layer": {
            name: round(float(each), 2) for name, each in zip(LAYERS, layers, strict=True)
        },
    }


def run(repeats: int, rows: tuple[int, ...]) -> dict[str, Any]:
    """Measure every number of rows."""
    torch.manual_seed(0)
    random.seed(0)
    layers = [providers(*shape) for shape in LAYERS.values()]
    results: dict[str, Any] = {}
    with torch.inference_mode():
        for count in rows:
            times = measure(layers, count, repeats)
            results[str(count)] = {
                name: ratio(times[BASELINE], each) for name, each in times.items()
            }
    return results


def promises(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Say which promised ratios were kept."""
    found = []
    for name, rows, wanted in PROMISES:
        if str(rows) in results:
            got = results[str(rows)][name]["ratio"]
            found.append(
                {
                    "provider": name,
                    "rows": rows,
                    "wanted": wanted,
                    "ratio": got,
                    "kept": got >= wanted,
                }
            )
    return found


def machine(threads: int) -> dict[str, Any]:
    """Say what was measured where."""
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "load_average": os.getloadavg(),
        "activations": "bfloat16",
        "native_rows": native_rows.why_not() or "rows.cpp",
        "fallbacks": [each._asdict() | {"count": count} for each, count in fallbacks().items()],
    }


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--repeats", type=int, default=40, help="at least 30 for a figure to publish"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu", type=int, help="pin to this core (Linux)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.cpu is not None:
        os.sched_setaffinity(0, {given.cpu})
    results = run(given.repeats, tuple(given.rows))
    printed = {
        "promises": promises(results),
        "machine": machine(given.threads),
        "repeats": given.repeats,
        "rows": results,
    }
    print(json.dumps(printed, indent=1, allow_nan=False))


if __name__ == "__main__":
    main()
