"""The fused lens against the straightforward one, as ratios in one run. Prints JSON.

Hidden states of SmolLM2-135M's layers and of its INT8 variant go through the reference's norm and
head (one sentence again and again). Straightforward: logits of all rows at once, log-softmax, Σ p
(ln p − ln q); in float64, which is what small divergences need to be right, also the products, and
in float32, which is wrong by 1 % at bfloat16's drift and negative below. `fused, int16` and `fused,
bfloat16` multiply 16-bit factors, `fused, torch's` float32 ones as a CPU without AVX-512 does. How
far all of them are off at all layers is what lens_errors.py prints; here it is the relative error
of the mean, and of the median token, against products and softmax in float64. Each round calls
everything once, in an order that rotates; the figure is the median ratio of a round, threads pinned
to cores: of processor time with one thread, since others may be at work, else of wall time. Memory
is the process's peak above what it had before the call.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import platformdirs
import psutil
import torch
from torch import Tensor, nn

from quantwatch.capture.readout import readout_of
from quantwatch.config.schema import VariantConfig
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant
from quantwatch_kernels.compare.lens import Readout, lens_statistics
from quantwatch_kernels.compare.lens_words_native import why_not_words
from quantwatch_kernels.compare.rounding import Factors
from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.registry import prefer

CACHE = Path(platformdirs.user_cache_dir("quantwatch"))
TEXT = (
    "The monitor runs a reference and its quantized variants side by side, and says what differs. "
)


def load(recipe: str | None) -> LoadedModel:
    settings: dict[str, Any] = {"model": "smollm2-135m", "recipe": recipe}
    config = VariantConfig(**settings)
    return load_variant(recipe or "reference", config, base_dir=Path(), cache_dir=CACHE)


def states(models: tuple[LoadedModel, LoadedModel], tokens: int, layer: int) -> list[Tensor]:
    """One layer's output [tokens, H] of both models."""
    ids = models[0].tokenizer(TEXT * tokens)["input_ids"][:tokens]
    found = []
    for model in models:
        out = model.module(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        found.append(out.hidden_states[layer][0].float().clone())
    return found


def straightforward(dtype: torch.dtype, readout: Readout, h: Tensor, other: Tensor) -> Tensor:
    z, y = readout.logits(h), readout.logits(other)
    log_p, log_q = (x.to(dtype).log_softmax(-1) for x in (z, y))
    ids = z.topk(5, dim=-1).indices
    (z.gather(-1, ids) - y.gather(-1, ids)).abs().mean(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def all_in_float64(weight: Tensor, readout: Readout, h: Tensor, other: Tensor) -> Tensor:
    z, y = (readout.normed(x).double() @ weight.t() for x in (h, other))
    log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
    ids = z.topk(5, dim=-1).indices
    (z.gather(-1, ids) - y.gather(-1, ids)).abs().mean(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def ours(backend: str, products: Factors, readout: Readout, h: Tensor, other: Tensor) -> Tensor:
    with prefer(backend):
        return lens_statistics(h, other, readout, products=products).kl


def product_alone(readout: Readout, h: Tensor, other: Tensor) -> Tensor:
    """The products that nobody can do without: both models' logits, written over each other."""
    for rows in torch.cat([readout.normed(h), readout.normed(other)]).split(256):
        readout.head_logits(rows, into="product alone")
    return h[:, 0]


WAYS: dict[str, Callable[[Readout, Tensor, Tensor], Tensor]] = {
    "fused": partial(ours, "native", "float32"),
    "fused, int16": partial(ours, "native", "int16"),
    "fused, bfloat16": partial(ours, "native", "bfloat16"),
    "fused, torch's": partial(ours, "pieces", "float32"),
    "straightforward, float64": partial(straightforward, torch.float64),
    "straightforward, float32": partial(straightforward, torch.float32),
    "whole rows": partial(ours, "aten", "float32"),
    "whole rows, int16": partial(ours, "aten", "int16"),
    "whole rows, bfloat16": partial(ours, "aten", "bfloat16"),
    "products alone": product_alone,
}


EXACT = "straightforward, all in float64"


def timed(call: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    call()
    return clock() - started


def peak_mb(call: Callable[[], object]) -> float:
    """Return how far the process's memory rises during a call, sampled each 2 ms."""
    process, most, done = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    call()
    done.set()
    thread.join()
    return round(max(0, most[0] - before) / 1e6, 1)


def ratios(times: dict[str, list[float]], unit: str) -> dict[str, float]:
    return {
        name: round(median(a / b for a, b in zip(taken, times[unit], strict=True)), 2)
        for name, taken in times.items()
    }


def measure(tokens: int, layer: int, rounds: int) -> dict[str, Any]:
    models = (load(None), load("int8-channel"))
    readout = readout_of(models[0])
    assert isinstance(readout.head, nn.Linear)
    weight = readout.head.weight.double()
    h, other = states(models, tokens, layer)
    ways = {**WAYS, EXACT: partial(all_in_float64, weight)}
    names = list(ways)
    workspace.clear()
    memory = {name: peak_mb(lambda name=name: ways[name](readout, h, other)) for name in names}  # type: ignore[misc]
    kl = {n: ways[n](readout, h, other).double() for n in names if n != "products alone"}
    truth = torch.cat(
        [ways[EXACT](readout, *pair) for pair in zip(h.split(64), other.split(64), strict=True)]
    )
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(timed(lambda name=name: ways[name](readout, h, other)))  # type: ignore[misc]
    return {
        "tokens": tokens,
        "layer": layer,
        "mean_kl": float(truth.mean()),
        "ms_per_token": {n: round(1e3 * median(t) / tokens, 3) for n, t in times.items()},
        "ratio_to": {unit: ratios(times, unit) for unit in names if unit.startswith("fused")},
        "relative_error": {
            n: [abs(float(k.mean() / truth.mean()) - 1), float((k / truth - 1).abs().nanmedian())]
            for n, k in kl.items()
        },
        "peak_mb": memory,
        "target": {"straightforward, float64, or all of it": 3.0, "peak_mb": 64},
    }


def main() -> None:
    """Print the figures of the given sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--layer", type=int, default=15, help="index into hidden_states")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-chosen.threads :])
    reason = why_not_words("int16") or why_not_words("bfloat16")
    if reason is not None:
        raise SystemExit(f"nothing to measure: {reason}")
    with torch.no_grad():
        found = [measure(tokens, chosen.layer, chosen.rounds) for tokens in chosen.tokens]
    print(json.dumps({"threads": chosen.threads, "sizes": found}, indent=2))


if __name__ == "__main__":
    main()
