"""Per-layer KL at every token the straightforward way and by a check, first night. Prints JSON.

Straightforward: both models run with all hidden states kept; layer by layer, one layer's logits
alive at a time, both states go through the reference's norm and head, log-softmax, Σ p (ln p −
ln q), in float64 or in float32. A check measures all taps and output statistics as well, with a
lens at every position, in float32 or bfloat16 products. Figures are medians of ratios within
rounds, of processor time.
"""

import argparse
import json
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from side_by_side import FULL_LENS, Path, capture, load_models, windows

from quantwatch.capture.readout import readout_of
from quantwatch.domain import Suite
from quantwatch.models.loaded import LoadedModel

Models = tuple[LoadedModel, LoadedModel]
TARGETS = {"float32": 2.0, "bfloat16": 3.0}


def straightforward(models: Models, suite: Suite, dtype: torch.dtype) -> list[float]:
    """Return every layer's mean KL."""
    readout, sums = readout_of(models[0]), []
    with torch.inference_mode():
        for prompt in suite.prompts:
            ids = torch.tensor([prompt.token_ids])
            theirs, ours = (
                model.module(ids, use_cache=False, output_hidden_states=True).hidden_states
                for model in models
            )
            for h, other in zip(theirs[1:], ours[1:], strict=True):
                z, y = (readout.logits(x[0]).to(dtype).log_softmax(-1) for x in (h, other))
                sums.append(float((z.exp() * (z - y)).sum(-1).mean()))
    return sums


def processor_time(call: Any) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=1, help="windows of 256 tokens")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    models = load_models(Path())
    suite = windows(models[0].tokenizer, chosen.prompts)
    plans = {name: replace(FULL_LENS, lens_products=name) for name in TARGETS}
    ways: dict[str, Any] = {
        "straightforward, float64": lambda: straightforward(models, suite, torch.float64),
        "straightforward, float32": lambda: straightforward(models, suite, torch.float32),
        **{
            f"check, {name}": lambda plan=plan: capture(models, suite, plan)
            for name, plan in plans.items()
        },
    }
    capture(models, replace(suite, prompts=suite.prompts[:1]), replace(FULL_LENS, lens_positions=8))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(chosen.rounds):
        for name, way in ways.items():
            times[name].append(processor_time(way))
    ratios = {
        f"{way} ÷ {check}": round(
            median(a / b for a, b in zip(times[way], times[check], strict=True)), 2
        )
        for way in list(ways)[:2]
        for check in list(ways)[2:]
    }
    seconds = {name: [round(t, 2) for t in taken] for name, taken in times.items()}
    found = {"tokens": suite.num_tokens, "seconds": seconds, "ratio": ratios, "target": TARGETS}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
