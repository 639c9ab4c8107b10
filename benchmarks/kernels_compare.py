"""µs per row of the comparing kernels, as JSON. One thread; the kinds of drift are interleaved.

Output statistics and lens at SmolLM2's 49,152 ids; the lens is what it costs beyond its readout,
which is timed alone in the same rounds. Taps at its hidden width 576 and at 1,536.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from quantwatch_kernels.compare.lens import Readout, lens_statistics
from quantwatch_kernels.compare.output import output_statistics
from quantwatch_kernels.compare.tap import feature_kl, isolated_error, tap_statistics
from quantwatch_kernels.registry import fallbacks
from quantwatch_kernels.testing import drifted_logits

VOCABULARY, HIDDEN = 49_152, 576
DRIFTS = {"bf16-like": 0.02, "int8-like": 0.12, "int4-like": 1.0}


@dataclass
class Timed:
    """A call on so many rows, and the seconds of each round."""

    rows: int
    call: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    def once(self) -> None:
        start = time.perf_counter()
        self.call()
        self.seconds.append(time.perf_counter() - start)

    def us_per_row(self) -> dict[str, float]:
        scaled = [1e6 * s / self.rows for s in self.seconds]
        return {"median": round(statistics.median(scaled), 2), "min": round(min(scaled), 2)}


class Recorded(nn.Module):
    """A head that hands out logits computed before, to time the lens without its matrix product."""

    def __init__(self, logits: Tensor, other: Tensor) -> None:
        super().__init__()
        self.pair, self.calls = (logits, other), 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return self.pair[(self.calls - 1) % 2][: len(h)]


def output_calls(rows: int) -> dict[str, Timed]:
    calls = {}
    targets = torch.arange(rows)
    for name, drift in DRIFTS.items():
        z, candidate = drifted_logits(rows, VOCABULARY, drift)

        def output(z: Tensor = z, candidate: Tensor = candidate) -> object:
            f32 = torch.float32
            return output_statistics(
                z, candidate, targets, reference_dtype=f32, candidate_dtype=f32
            )

        h = torch.randn(rows, 4)
        readout = Readout(lambda x: x, Recorded(z, candidate))

        def lens(h: Tensor = h, readout: Readout = readout) -> object:
            return lens_statistics(h, h + 1, readout, chunk=len(h))

        calls[f"output_statistics {name}"] = Timed(rows, output)
        calls[f"lens_statistics beyond the readout, {name}"] = Timed(rows, lens)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
    readout, states = Readout(nn.RMSNorm(HIDDEN), head), torch.randn(rows, HIDDEN)
    calls["readout of one model"] = Timed(rows, lambda: readout.logits(states))
    return calls


def tap_calls(rows: int) -> dict[str, Timed]:
    calls = {}
    for width in (576, 1536):
        h = torch.randn(rows, width)
        other = h + 0.01 * torch.randn(rows, width)
        calls[f"tap_statistics {width}"] = Timed(rows, partial(tap_statistics, h, other))
        calls[f"feature_kl {width}"] = Timed(rows, partial(feature_kl, h, other))
        calls[f"isolated_error {width}"] = Timed(rows, partial(isolated_error, h, other, h))
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    calls = output_calls(arguments.rows) | tap_calls(2 * arguments.rows)
    for round_number in range(arguments.rounds + 1):
        for timed in calls.values():
            timed.once()
            if round_number == 0:
                timed.seconds.clear()
    print(
        json.dumps(
            {
                "unit": "us_per_row",
                "threads": torch.get_num_threads(),
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                "torch": torch.__version__,
                "rows": arguments.rows,
                "rounds": arguments.rounds,
                "results": {name: timed.us_per_row() for name, timed in calls.items()},
                "fallback_rows": {" | ".join(key): n for key, n in fallbacks().items()},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
