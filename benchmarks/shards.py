"""What several processes save on one machine, and that they measure the same bits. Prints JSON.

SmolLM2-135M float32 against INT8 `dequantized`, windows of 256 tokens of core-v1, default plan, one
thread per process. Every round measures the whole check, loading included, with each executor in
turn; ratios are per round. `measuring` begins with the first batch that is done: processes that are
started import torch and load the models first, which a long suite does not feel and a short one
does. All runs' rows are compared bit for bit. Four processes on fewer cores are measured for their
bits alone.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from nights import digest
from side_by_side import CACHE

from quantwatch.config.schema import CheckConfig
from quantwatch.pipeline import RunRequest
from quantwatch.pipeline.executors import sharding
from quantwatch.pipeline.measure import measure_check
from quantwatch.telemetry import environment

MODEL = {"model": "smollm2-135m"}
KINDS: dict[str, dict[str, Any]] = {
    "inline": {},
    "one_process": {"executor": "local", "shards": 1},
    "two_processes": {"executor": "local", "shards": 2},
    "four_processes": {"executor": "local", "shards": 4},
    "ray_two": {"executor": "ray", "shards": 2},
}
CORES = sharding.cores()


class Clock:
    """A progress that notes when the first batch was done."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.tokens_then = self.tokens = 0

    def start(self, stage: str, total_tokens: int) -> None:
        pass

    def advance(self, tokens: int) -> None:
        self.tokens += tokens
        if tokens and self.first is None:
            self.first, self.tokens_then = time.perf_counter(), self.tokens


@dataclass(frozen=True)
class Run:
    """One check, measured: seconds, tokens (of all models) per second, what was told, a digest."""

    whole_s: float
    tokens_per_s: float
    told: Any
    digest: str
    num_tokens: int


def run(texts: Path, settings: dict[str, Any]) -> Run:
    check = CheckConfig.model_validate(
        {
            "reference": MODEL,
            "candidates": [{**MODEL, "name": "int8", "recipe": "int8-channel"}],
            "suite": {"files": [str(texts)]},
            "threads": 1,
            **settings,
        }
    )
    clock, started = Clock(), time.perf_counter()
    with measure_check(RunRequest("shards", check, Path(), CACHE), clock) as measured:
        ended = time.perf_counter()
        found = digest(measured.sink, "int8", _Floor(measured.floor))  # type: ignore[arg-type]
        assert clock.first is not None
        speed = (clock.tokens - clock.tokens_then) / (ended - clock.first)
        told, tokens = measured.report.sharding, measured.suite.num_tokens
    return Run(ended - started, speed, told, found, tokens)


@dataclass(frozen=True)
class _Floor:
    values: Any


def ratios(rounds: Sequence[dict[str, Run]], kind: str) -> dict[str, Any]:
    """Return how much faster a kind is than the run's own process, per round."""
    whole = [each["inline"].whole_s / each[kind].whole_s for each in rounds]
    speed = [each[kind].tokens_per_s / each["inline"].tokens_per_s for each in rounds]
    return {
        "whole_check": {"median": round(median(whole), 2), "rounds": [round(r, 2) for r in whole]},
        "measuring": {"median": round(median(speed), 2), "rounds": [round(r, 2) for r in speed]},
    }


def texts(folder: Path, windows: int) -> Path:
    """Write windows of core-v1 as prompts of one's own."""
    from side_by_side import WINDOW, load_models

    from quantwatch.config.schema import SuiteConfig
    from quantwatch.prompts.loading import load_suite

    tokenizer: Any = load_models(Path())[0].tokenizer
    suite = load_suite(SuiteConfig(name="core-v1"), tokenizer, base_dir=Path(), max_positions=8192)
    ids = [i for prompt in suite.prompts for i in prompt.token_ids]
    parts = [tokenizer.decode(ids[n * WINDOW :][:WINDOW]) for n in range(windows)]
    file = folder / "windows.json"
    file.write_text(json.dumps(parts))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS][:4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {"inline": KINDS["inline"], **{kind: KINDS[kind] for kind in options.kinds}}
    sharding.cores = lambda: max(CORES, 4)
    with tempfile.TemporaryDirectory(prefix="quantwatch-shards-") as place:
        file = texts(Path(place), options.windows)
        rounds = [
            {kind: run(file, settings) for kind, settings in kinds.items()}
            for _ in range(options.rounds)
        ]
    last = rounds[-1]
    document = {
        "cores": CORES,
        "threads_per_process": 1,
        "num_tokens": last["inline"].num_tokens,
        "environment": environment(),
        "equal_bit_for_bit": len({each.digest for r in rounds for each in r.values()}) == 1,
        "seconds": {kind: round(each.whole_s, 1) for kind, each in last.items()},
        "tokens_per_second": {kind: round(each.tokens_per_s, 1) for kind, each in last.items()},
        "told": {kind: each.told for kind, each in last.items()},
        "ratio": {kind: ratios(rounds, kind) for kind in kinds if kind != "inline"},
    }
    print(json.dumps(document, indent=2, allow_nan=False))


if __name__ == "__main__":
    main()
