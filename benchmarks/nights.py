"""What a recorded reference saves: first night, second night, several candidates. Prints JSON.

SmolLM2-135M float32 against recipes computed dequantized, windows of 256 tokens of core-v1, a
check's defaults; with `--lens estimated` every layer at every position is estimated. Every kind of
night is done once per round; ratios are per round, medians and all rounds are printed, of wall time
and of processor time (other work on the machine moves the first one only). Loading is timed apart:
it is the same for each night. All nights' measurements are compared bit for bit.
"""

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from side_by_side import CACHE, WINDOW, Quiet, windows

from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.side_by_side import Subject, capture
from quantwatch.capture.stored.shelf import Shelf
from quantwatch.config.schema import VariantConfig
from quantwatch.domain import Suite
from quantwatch.metrics.aggregate import Aggregator
from quantwatch.metrics.floor import NoiseFloor
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant
from quantwatch.telemetry import environment

RECIPES = ("int8-channel", "int4-g128", "int4-g64", "int4-g32")
TARGETS = {"four_cold": 0.70, "four_warm": 0.60}
SECOND = {"sampled": 0.70, "estimated": 0.55}


@dataclass(frozen=True)
class Night:
    """One capture: seconds, where its reference came from, and digests of what it measured."""

    wall_s: float
    cpu_s: float
    use: Any
    timings_s: dict[str, float]
    digests: dict[str, str]


def load(name: str, recipe: str | None = None) -> LoadedModel:
    config = VariantConfig(model="smollm2-135m", recipe=recipe)
    return load_variant(name, config, base_dir=Path(), cache_dir=CACHE)


def night(
    models: dict[str, LoadedModel],
    names: Sequence[str],
    suite: Suite,
    plan: CapturePlan,
    shelf: Shelf | None = None,
) -> Night:
    chosen = {name: models[name] for name in ("reference", *names)}
    floor = NoiseFloor()
    with Aggregator(suite, CACHE / "spool") as sink:
        wall, cpu = time.perf_counter(), time.process_time()
        subject = Subject(chosen, suite, plan, shelf)
        report = capture(subject, sink, floor, Quiet())
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        digests = {name: digest(sink, name, floor) for name in names}
    return Night(wall, cpu, report.reference_cache, report.timings_s, digests)


def digest(sink: Aggregator, name: str, floor: NoiseFloor) -> str:
    found = hashlib.sha256(repr(sorted(floor.values.items())).encode())
    for block in sink.blocks(name):
        found.update(f"{block.kind} {block.metric} {block.prompt}".encode())
        found.update(block.values.tobytes())
        if block.missing is not None:
            found.update(block.missing.tobytes())
    found.update(repr((sink.measurements(name), sink.first_nonfinite(name))).encode())
    return found.hexdigest()


def one_round(
    models: dict[str, LoadedModel], suite: Suite, plan: CapturePlan, place: Path
) -> dict[str, list[Night]]:
    names = [name for name in models if name != "reference"]
    one, many = Shelf(place / "one"), Shelf(place / "many")
    nights = {"first_night": [night(models, names[:1], suite, plan, one)]}
    nights["second_night"] = [night(models, names[:1], suite, plan, one)]
    nights["separate"] = [night(models, [name], suite, plan) for name in names]
    if len(names) > 1:
        nights["four_cold"] = [night(models, names, suite, plan, many)]
        nights["four_warm"] = [night(models, names, suite, plan, many)]
    for shelf in (one, many):
        shutil.rmtree(shelf.folder, ignore_errors=True)
    return nights


def ratios(rounds: list[dict[str, list[Night]]], clock: str) -> dict[str, list[float]]:
    against = {
        "recording": ("first_night", lambda r: getattr(r["separate"][0], clock)),
        "second_night": ("second_night", lambda r: total(r["first_night"], clock)),
        "four_cold": ("four_cold", lambda r: total(r["separate"], clock)),
        "four_warm": ("four_warm", lambda r: total(r["separate"], clock)),
    }
    return {
        name: [round(total(r[kind], clock) / base(r), 3) for r in rounds]
        for name, (kind, base) in against.items()
        if kind in rounds[0]
    }


def total(nights: list[Night], clock: str) -> float:
    return float(sum(getattr(each, clock) for each in nights))


def equal(rounds: list[dict[str, list[Night]]]) -> bool:
    """Say whether a candidate's measurements are the same in every night."""
    seen: dict[str, set[str]] = {}
    for each in (n for r in rounds for nights in r.values() for n in nights):
        for name, found in each.digests.items():
            seen.setdefault(name, set()).add(found)
    return all(len(found) == 1 for found in seen.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--candidates", type=int, choices=(1, 4), default=4)
    parser.add_argument("--lens", choices=SECOND, default="sampled")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    plan = CapturePlan(lens=options.lens)
    torch.set_num_threads(options.threads)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-options.threads :])
    started = time.perf_counter()
    models = {"reference": load("reference")}
    models |= {recipe: load(recipe, recipe) for recipe in RECIPES[: options.candidates]}
    load_s = time.perf_counter() - started
    suite = windows(models["reference"].tokenizer, max(1, options.tokens // WINDOW))
    # Whoever is first pays for fresh memory and for the lens' compiler, not for the reference.
    night(models, list(models)[1:], replace(suite, prompts=suite.prompts[:1]), plan)
    with tempfile.TemporaryDirectory(prefix="quantwatch-nights-") as place:
        rounds = [one_round(models, suite, plan, Path(place)) for _ in range(options.rounds)]
    last = rounds[-1]
    used = last["second_night"][0].use
    document = {
        "num_threads": options.threads,
        "num_tokens": suite.num_tokens,
        "lens": options.lens,
        "environment": environment(),
        "load_s": round(load_s, 1),
        "kilobytes_per_token": round(used["num_bytes"] / used["num_tokens"] / 1e3, 1),
        "store_floor_logit_kl": used["floor_logit_kl"],
        "audit": used["audit"],
        "equal_bit_for_bit": equal(rounds),
        "seconds": {
            kind: {
                "wall": round(total(nights, "wall_s"), 1),
                "cpu": round(total(nights, "cpu_s"), 1),
                "origin": nights[0].use["origin"],
                "stages": {n: round(s, 2) for n, s in nights[0].timings_s.items()},
            }
            for kind, nights in last.items()
        },
        **{
            f"ratio_{clock}": {
                name: {"median": median(values), "rounds": values}
                for name, values in ratios(rounds, f"{clock}_s").items()
            }
            for clock in ("wall", "cpu")
        },
        "target": {"second_night": SECOND[options.lens], **TARGETS},
    }
    print(json.dumps(document, indent=2, allow_nan=False))


if __name__ == "__main__":
    main()
