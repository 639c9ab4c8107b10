"""Per-layer KL at every layer and position by the estimator: what it costs, how far it is off.

Prints JSON. One process, pinned threads; every round times the candidate's bare forward and the
parts of its pass one after another on the same window of 256 tokens of core-v1, after a window that
isn't timed. Figures are medians of ratios within rounds: of processor time with one thread, since
other work on the machine stretches clocks, else of wall time. `pass` is the candidate's whole
share: its forward with the product of its head, all taps, and the estimates. `sketch` is what the
reference pays once. Errors are against the fused exact lens at every layer and position.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from side_by_side import CACHE, WINDOW, windows

from quantwatch.capture.batches import Batch
from quantwatch.capture.compare import Reading, read_candidate
from quantwatch.capture.estimates import estimate_layers, relative_difference
from quantwatch.capture.layers import read_layers
from quantwatch.capture.layout import Layout, lay_out
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.probe import Probe
from quantwatch.capture.readout import readout_of
from quantwatch.capture.sketches import LayerSketch, sketch_layers
from quantwatch.capture.trace import LiveTraceSource, Trace
from quantwatch.config.schema import VariantConfig
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant
from quantwatch_kernels.compare.lens import Readout

TARGETS = {"pass": 1.35, "layer_mean": 0.01, "token_median": 0.05}
Matrix = NDArray[np.float64]


def load(name: str) -> LoadedModel:
    """Load SmolLM2-135M: `reference`, `bfloat16`, or with a recipe."""
    settings: dict[str, Any] = {"model": "smollm2-135m"}
    if name == "bfloat16":
        settings["dtype"] = name
    elif name != "reference":
        settings["recipe"] = name
    return load_variant(name, VariantConfig(**settings), base_dir=Path(), cache_dir=CACHE)


def batches(model: LoadedModel, tokens: int) -> tuple[str, list[Batch]]:
    """Return the hash of a suite of windows, and each as a batch."""
    cut = windows(model.tokenizer, -(-tokens // WINDOW))
    return cut.hash, [Batch((prompt,)) for prompt in cut.prompts]


class Bench:
    """One candidate beside the reference, window by window."""

    def __init__(self, reference: Probe, candidate: Probe, plan: CapturePlan) -> None:
        self.reference, self.candidate, self.plan = reference, candidate, plan
        self.source = LiveTraceSource(reference)
        self.readout = readout_of(reference.model)
        self.times: dict[str, list[float]] = {}
        self.clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def window(self, batch: Batch, suite_hash: str, rounds: int) -> tuple[Matrix, Matrix]:
        """Return estimated and exact KL [layers, tokens] of a window; times are kept."""
        layout = lay_out(batch, suite_hash, self.plan)
        trace = self.source.trace(batch)
        started = self.clock()
        sketch = sketch_layers(self.readout, trace.taps, layout, self.plan)
        self._note("sketch", self.clock() - started)
        for _ in range(rounds):
            self._round(batch, trace, layout, sketch)
        reading = read_candidate(self.candidate, batch, trace)
        layers = {s: (trace.taps[s], hidden) for s, hidden in reading.layers.items()}
        start = batch.prompts[0].score_start
        everywhere = np.arange(start, start + len(layout.rows))
        started = self.clock()
        (exact,) = read_layers(self.readout, layers, layout, [(0, everywhere)])
        self._note("fused lens", self.clock() - started)
        estimated = estimate_layers(self.readout, layers, layout, sketch)
        return estimated.kl, exact.statistics["lens_kl"]

    def _round(self, batch: Batch, trace: Trace, layout: Layout, sketch: LayerSketch) -> None:
        ids = torch.tensor([batch.prompts[0].token_ids])
        self._time("bare", lambda: self._bare(ids))
        reading = self._time("taps", lambda: read_candidate(self.candidate, batch, trace))
        layers = {s: (trace.taps[s], hidden) for s, hidden in reading.layers.items()}
        self._time("head", lambda: self._head(reading))
        self._time("estimates", lambda: estimate_layers(self.readout, layers, layout, sketch))

    def _bare(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.candidate.model.module(ids, use_cache=False).logits
            return logits

    def _head(self, reading: Reading) -> None:
        own: Readout = readout_of(self.candidate.model)
        own.head_logits(reading.head_input, into="candidate logits")

    def _time(self, name: str, work: Callable[[], Any]) -> Any:
        started = self.clock()
        found = work()
        self._note(name, self.clock() - started)
        return found

    def _note(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, []).append(seconds)

    def ratios(self, rounds: int) -> dict[str, Any]:
        """Return every part in units of the bare forward beside it, and the estimate's speedup."""
        bare = np.array(self.times["bare"])
        parts = {name: np.array(self.times[name]) / bare for name in ("taps", "head", "estimates")}
        whole = sum(parts.values())
        by_window = np.median(bare.reshape(-1, rounds), axis=1)
        fused = np.array(self.times["fused lens"])
        estimates = np.median(np.array(self.times["estimates"]).reshape(-1, rounds), axis=1)
        return {
            "pass": round(float(np.median(whole)), 3),
            "pass_min_max": [round(float(np.min(whole)), 3), round(float(np.max(whole)), 3)],
            **{name: round(float(np.median(part)), 3) for name, part in parts.items()},
            "sketch": round(float(np.median(self.times["sketch"] / by_window)), 2),
            "fused lens": round(float(np.median(fused / by_window)), 2),
            "fused_lens_by_estimates": round(float(np.median(fused / estimates)), 1),
        }


def errors(estimated: Matrix, exact: Matrix, layers: tuple[str, ...]) -> dict[str, Any]:
    """Return how far layer means and single tokens are off, in the worst layer and altogether."""
    means = np.abs(estimated.mean(1) / exact.mean(1) - 1)
    tokens = np.median(relative_difference(estimated, exact), axis=1)
    return {
        "layer_mean_worst": {layers[int(means.argmax())]: float(means.max())},
        "layer_mean_median": float(np.median(means)),
        "token_median_worst": {layers[int(tokens.argmax())]: float(tokens.max())},
        "token_median_all": float(np.median(relative_difference(estimated, exact))),
        "mean_kl": {"first": float(exact[0].mean()), "last": float(exact[-1].mean())},
    }


def measure(name: str, reference: LoadedModel, sizes: argparse.Namespace) -> dict[str, Any]:
    """Run one candidate over the windows."""
    plan = replace(
        CapturePlan(isolated_fraction=0.0, worst_positions=0, lens="estimated"),
        sketch_top=sizes.k,
        sketch_draws=sizes.m,
    )
    with ExitStack() as stack, torch.no_grad():
        probes = [stack.enter_context(Probe(m.variant.name, m)) for m in (reference, load(name))]
        bench = Bench(probes[0], probes[1], plan)
        digest, cut = batches(reference, sizes.tokens)
        bench.window(cut[0], digest, 1)  # warm up: buffers, native code, pages of the weights
        bench.times.clear()
        found = [bench.window(batch, digest, sizes.rounds) for batch in cut]
    estimated, exact = (np.concatenate(side, axis=1) for side in zip(*found, strict=True))
    layers = tuple(f"layers.{n}" for n in range(len(exact)))
    return {"ratio_to_bare": bench.ratios(sizes.rounds), "errors": errors(estimated, exact, layers)}


def main() -> None:
    """Print the figures of the given candidates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--m", type=int, default=96)
    parser.add_argument("--candidates", nargs="+", default=["int8-channel"])
    sizes = parser.parse_args()
    torch.set_num_threads(sizes.threads)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-sizes.threads :])
    reference = load("reference")
    found = {name: measure(name, reference, sizes) for name in sizes.candidates}
    print(json.dumps({**vars(sizes), "targets": TARGETS, "found": found}, indent=2))


if __name__ == "__main__":
    main()
