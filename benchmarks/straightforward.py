"""A whole comparison against the straightforward way. Prints JSON.

Straightforward: both models with all hidden states, `--batch` tokens at once; each layer through
the reference's norm and head at every position, one layer's logits alive at a time, log-softmax,
KL, top-5 deviation, relative error; in float32, and in float64 after the products, which small
divergences need. Ours, the same taps and statistics without isolated errors: every layer at every
position (`exact`, with 16-bit factors `exact_int16` and `exact_bfloat16`), at 8 of 256 (`sampled`),
every position estimated on a first night that records its reference (`estimated`) and on a second
one that reads it (`warm`).

SmolLM2-135M float32 against INT8 `dequantized`, windows of 256 tokens of core-v1. Each way runs
once a round on the same windows; ratios are within a round, of processor time with one thread, else
of wall time; medians are printed.
Memory is measured apart: each way in a process of its own, peak above the two loaded models.
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from nights import load
from side_by_side import CACHE, FULL_LENS, OUTPUT_ONLY, WINDOW, Quiet, bare, windows
from torch import Tensor

from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.readout import readout_of
from quantwatch.capture.side_by_side import Subject, capture
from quantwatch.capture.stored.shelf import Shelf
from quantwatch.domain import Suite
from quantwatch.metrics.aggregate import Aggregator
from quantwatch.metrics.floor import NoiseFloor
from quantwatch.models.loaded import LoadedModel
from quantwatch.telemetry import environment

ESTIMATED = replace(OUTPUT_ONLY, lens_positions=8, lens="estimated")
PLANS = {
    "exact": FULL_LENS,
    "exact_int16": replace(FULL_LENS, lens_products="int16"),
    "exact_bfloat16": replace(FULL_LENS, lens_products="bfloat16"),
    "sampled": replace(OUTPUT_ONLY, lens_positions=8),
    "estimated": ESTIMATED,
    "warm": ESTIMATED,
}
TARGETS = {"exact": 2, "exact_bfloat16": 3, "sampled": 5, "warm": 9, "memory": 0.25}
_TOP = 5
Models = dict[str, LoadedModel]
Way = Callable[[], list[float]]


def straightforward(models: Models, suite: Suite, batch: int, dtype: torch.dtype) -> list[float]:
    """Return the mean KL of each layer but the last, then of the output."""
    reference, candidate = (model.module for model in models.values())
    readout = readout_of(models["reference"])
    sums, tokens = list[float](), 0
    rows = torch.tensor([prompt.token_ids for prompt in suite.prompts])
    for ids in rows.split(max(1, batch // WINDOW)):
        with torch.inference_mode():
            out = [
                m(ids, use_cache=False, output_hidden_states=True) for m in (reference, candidate)
            ]
            pairs = list(zip(*(o.hidden_states[1:-1] for o in out), strict=True))
            means = [_layer(readout.logits, h, other, dtype) for h, other in pairs]
            means.append(_statistics(*(o.logits.flatten(0, 1) for o in out), dtype))
        found = [float(kl.double().sum()) for kl in means]
        sums = found if not sums else [a + b for a, b in zip(sums, found, strict=True)]
        tokens += ids.numel()
    return [each / tokens for each in sums]


def _layer(logits: Any, h: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    h, other = h.flatten(0, 1), other.flatten(0, 1)
    (h - other).norm(dim=-1) / h.norm(dim=-1)
    return _statistics(logits(h), logits(other), dtype)


def _statistics(z: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    log_p, log_q = (x.to(dtype).log_softmax(-1) for x in (z, y))
    ids = z.topk(_TOP, dim=-1).indices
    (z.gather(-1, ids) - y.gather(-1, ids)).abs().mean(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def ours(models: Models, suite: Suite, plan: CapturePlan, shelf: Shelf | None) -> list[float]:
    """Return the mean KL of each layer but the last, then of the output."""
    with Aggregator(suite, CACHE / "spool") as sink:
        capture(Subject(models, suite, plan, shelf), sink, NoiseFloor(), Quiet())
        name = next(name for name in models if name != "reference")
        metric = "lens_kl_estimated" if plan.lens == "estimated" else "lens_kl"
        found = {(row.metric, str(row.scope)): row.mean for row in sink.measurements(name)}
    layers = len(models["reference"].module.model.layers)
    wanted = [(metric, f"layers.{i}") for i in range(layers - 1)] + [("logit_kl", "model")]
    return [float(found[each]) for each in wanted]


def ways(models: Models, suite: Suite, options: argparse.Namespace, place: Path) -> dict[str, Way]:
    """Return each way, in the order that lets `warm` read what `estimated` has recorded."""
    shelf, batch, wanted = Shelf(place), options.batch, options.ways
    shelves = {"estimated": shelf, "warm": shelf}
    known: dict[str, Way] = {
        "float32": lambda: straightforward(models, suite, batch, torch.float32),
        "float64": lambda: straightforward(models, suite, batch, torch.float64),
        **{
            name: (lambda name=name: ours(models, suite, PLANS[name], shelves.get(name)))
            for name in PLANS
        },
    }
    return {name: way for name, way in known.items() if wanted is None or name in wanted}


def timed(work: Way) -> tuple[float, list[float]]:
    """Return seconds, of the processor with one thread, and what was found."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    found = work()
    return clock() - began, found


def peak_mb(name: str, options: argparse.Namespace) -> float:
    """Return what a way takes beyond the loaded models, in a process of its own."""
    words = [sys.executable, __file__, "--peak", name, "--tokens", str(options.tokens)]
    words += ["--batch", str(options.batch), "--threads", str(options.threads)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def own_peak(work: Way) -> float:
    """Return the process's peak while it works above what it has now, MB."""
    gc.collect()
    now = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")
    work()
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return (peak - now) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=2048, help="of the straightforward way")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--ways", nargs="+", help="only these, and no memory; float64 is among them"
    )
    parser.add_argument("--peak", help="internal: print what this way takes")
    options = parser.parse_args()
    if options.ways:
        options.ways = {
            "float64",
            *options.ways,
            *(("estimated",) if "warm" in options.ways else ()),
        }
    torch.set_num_threads(options.threads)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.threads :])
    models = {"reference": load("reference"), "int8": load("int8", "int8-channel")}
    suite = windows(models["reference"].tokenizer, max(1, options.tokens // WINDOW))
    first = replace(suite, prompts=suite.prompts[:1])
    with tempfile.TemporaryDirectory(prefix="quantwatch-straightforward-") as folder:
        place = Path(folder)
        if options.peak:
            known = ways(models, suite, options, place / "peak")
            bare(tuple(models.values()), first)  # weights that are made when they are needed
            if options.peak == "warm":
                known["estimated"]()
            print(own_peak(known[options.peak]))
            return
        for name, work in ways(models, first, options, place / "first").items():
            timed(work)  # Compilers and fresh memory are nobody's.
            print(f"{name} is warm", file=sys.stderr, flush=True)
        rounds = []
        for number in range(options.rounds):
            known = ways(models, suite, options, place / str(number))
            rounds.append({name: timed(work) for name, work in known.items()})
            shutil.rmtree(place / str(number), ignore_errors=True)
    print(json.dumps(document(rounds, options), indent=2, allow_nan=False))


def document(rounds: list[dict[str, tuple[float, list[float]]]], options: Any) -> dict[str, Any]:
    """Return the figures: times of the last round, ratios, errors of layer means, memory."""
    last = rounds[-1]
    true = last["float64"][1]
    measured = [name for name in PLANS if name in last]
    memory = {} if options.ways else {name: round(peak_mb(name, options), 1) for name in last}
    return {
        "num_threads": options.threads,
        "num_tokens": options.tokens // WINDOW * WINDOW,
        "batch_of_the_straightforward": options.batch,
        "environment": environment(),
        "load": os.getloadavg()[0],
        "seconds": {name: round(spent, 2) for name, (spent, _) in last.items()},
        **{
            f"times_faster_than_{base}": {
                name: round(median(r[base][0] / r[name][0] for r in rounds), 2) for name in measured
            }
            for base in ("float64", "float32")
            if base in last
        },
        "worst_layer_mean_off_by": {
            name: max(abs(a / b - 1) for a, b in zip(found, true, strict=True))
            for name, (_, found) in last.items()
            if name != "sampled"  # a sample is another mean
        },
        "peak_mb": memory,
        "memory_of_the_straightforward": {
            name: round(memory[name] / memory["float32"], 3) for name in PLANS if memory
        },
        "target": TARGETS,
    }


if __name__ == "__main__":
    main()
