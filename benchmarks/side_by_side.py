"""What measuring costs beside two bare forward passes, and how much memory it takes. Prints JSON.

Everything is interleaved in one process with pinned threads, since absolute times on shared
machines move by a factor of two; the published figures are the medians of the per-round ratios.
Protocol of the project: SmolLM2-135M float32 against INT8 `dequantized`, 16 × 256 tokens of
core-v1, full logits, no cache.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import platformdirs
import torch

from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.side_by_side import capture_suite
from quantwatch.config.schema import SuiteConfig, VariantConfig
from quantwatch.domain import Suite
from quantwatch.metrics.aggregate import Aggregator
from quantwatch.metrics.floor import NoiseFloor
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant
from quantwatch.prompts.loading import load_suite, suite_from_token_ids
from quantwatch.telemetry import environment

CACHE = Path(platformdirs.user_cache_dir("quantwatch"))
WINDOW = 256
OUTPUT_ONLY = CapturePlan(lens_positions=0, isolated_fraction=0.0, worst_positions=0)
PLANS = {
    "taps_and_output": OUTPUT_ONLY,
    "lens_8_of_256": replace(OUTPUT_ONLY, lens_positions=8),
    "default_check": CapturePlan(),
}
FULL_LENS = replace(OUTPUT_ONLY, lens_positions=WINDOW)
TARGETS = {"taps_and_output": 1.10, "lens_8_of_256": 1.35, "default_check": 1.6}


class Quiet:
    """A progress that says nothing."""

    def start(self, stage: str, total_tokens: int) -> None:
        pass

    def advance(self, tokens: int) -> None:
        pass


def load_models(base: Path) -> tuple[LoadedModel, LoadedModel]:
    model = {"model": "smollm2-135m"}
    configs = (VariantConfig(**model), VariantConfig(**model, recipe="int8-channel"))
    names = ("reference", "int8")
    first, second = (
        load_variant(name, config, base_dir=base, cache_dir=CACHE)
        for name, config in zip(names, configs, strict=True)
    )
    return first, second


def windows(tokenizer: Any, count: int) -> Suite:
    """Cut core-v1, all prompts in order, into windows of 256 tokens, again if it runs out."""
    suite = load_suite(SuiteConfig(name="core-v1"), tokenizer, base_dir=Path(), max_positions=8192)
    ids = [i for prompt in suite.prompts for i in prompt.token_ids]
    ids *= 1 + count * WINDOW // len(ids)
    return suite_from_token_ids([ids[i * WINDOW :][:WINDOW] for i in range(count)], tokenizer)


def bare(models: tuple[LoadedModel, LoadedModel], suite: Suite) -> None:
    with torch.inference_mode():
        for prompt in suite.prompts:
            ids = torch.tensor([prompt.token_ids])
            for model in models:
                model.module(ids, use_cache=False).logits  # noqa: B018 (only the work counts)


def capture(models: tuple[LoadedModel, LoadedModel], suite: Suite, plan: CapturePlan) -> Aggregator:
    sink = Aggregator(suite, CACHE / "spool")
    pair = {"reference": models[0], "int8": models[1]}
    capture_suite(pair, suite, plan, sink, NoiseFloor(), Quiet())
    return sink


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def interleaved(models: tuple[LoadedModel, LoadedModel], suite: Suite, rounds: int) -> Any:
    """Time every plan once per round between two bare runs; ratios against their mean."""
    times: dict[str, list[float]] = {"bare": [], **{name: [] for name in PLANS}}
    ratios: dict[str, list[float]] = {name: [] for name in PLANS}
    bare(models, replace(suite, prompts=suite.prompts[:1]))
    for _ in range(rounds):
        for name, plan in PLANS.items():
            before = seconds(lambda: bare(models, suite))
            took = seconds(lambda plan=plan: capture(models, suite, plan))  # type: ignore[misc]
            after = seconds(lambda: bare(models, suite))
            times["bare"] += [before, after]
            times[name].append(took)
            ratios[name].append(2 * took / (before + after))
    return {
        "seconds": {name: round(median(values), 3) for name, values in times.items()},
        "ratio": {name: round(median(values), 3) for name, values in ratios.items()},
        "ratio_min_max": {n: [round(min(v), 3), round(max(v), 3)] for n, v in ratios.items()},
        "target": TARGETS,
    }


def against_full_lens(models: tuple[LoadedModel, LoadedModel], suite: Suite) -> Any:
    """Time sampled against full lens and compare their values at the sampled positions."""
    sampled_sink: list[Aggregator] = []
    full_sink: list[Aggregator] = []
    plan = PLANS["lens_8_of_256"]
    sampled = seconds(lambda: sampled_sink.append(capture(models, suite, plan)))
    full = seconds(lambda: full_sink.append(capture(models, suite, FULL_LENS)))
    everything = {b.prompt: b for b in full_sink[0].blocks("int8") if _is_lens(b)}
    worst = 0.0
    for block in sampled_sink[0].blocks("int8"):
        if _is_lens(block) and block.missing is not None:
            seen = ~block.missing
            other = everything[block.prompt].values[seen]
            worst = max(worst, float(abs(block.values[seen] / other - 1).max()))
    tokens = suite.num_tokens
    return {
        "num_tokens": tokens,
        "seconds_sampled": round(sampled, 3),
        "seconds_full": round(full, 3),
        "speedup": round(full / sampled, 2),
        "largest_relative_difference": worst,
        "target": {"speedup": 5, "largest_relative_difference": 1e-5},
    }


def _is_lens(block: Any) -> bool:
    return (block.kind, block.metric) == ("per_token", "lens_kl")


def peak_memory(tokens: int) -> float:
    """Return MB above the two loaded models at the peak of a default check, in this process."""
    models = load_models(Path())
    suite = windows(models[0].tokenizer, tokens // WINDOW)
    bare(models, replace(suite, prompts=suite.prompts[:1]))
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    loaded = _status("VmRSS")
    capture(models, suite, CapturePlan())
    return (_status("VmHWM") - loaded) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def memory() -> Any:
    """Measure each size in a fresh process: the allocator keeps what an earlier size freed."""
    peaks = {}
    for tokens in (2048, 16384):
        command = [sys.executable, __file__, "--peak-memory", str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[str(tokens)] = round(float(done.stdout), 1)
    return {"peak_mb_above_models": peaks, "target": {"peak_mb": 400, "difference_mb": 50}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16, help="windows of 256 tokens")
    parser.add_argument("--lens-prompts", type=int, default=4, help="windows for the full lens")
    parser.add_argument("--only", choices=("ratios", "lens", "memory"))
    parser.add_argument("--peak-memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak_memory:
        print(peak_memory(options.peak_memory))
        return
    document: dict[str, Any] = {"num_threads": 1, "environment": environment()}
    if options.only in (None, "memory"):
        document["memory"] = memory()
    if options.only != "memory":
        models = load_models(Path())
        suite = windows(models[0].tokenizer, options.prompts)
    if options.only in (None, "ratios"):
        document["ratios"] = interleaved(models, suite, options.rounds)
    if options.only in (None, "lens"):
        few = windows(models[0].tokenizer, options.lens_prompts)
        document["full_lens"] = against_full_lens(models, few)
    print(json.dumps(document, indent=2, allow_nan=False))


if __name__ == "__main__":
    main()
