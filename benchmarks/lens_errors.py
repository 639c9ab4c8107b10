"""How far the lens of 16-bit factors is off, layer by layer, against float64. Prints JSON.

Every layer's output of SmolLM2-135M and of a candidate at every token of windows of core-v1, read
off through the reference's norm and head. The truth has products and softmax in float64; the fused
lens with float32 products stands beside it. A token's error is |KL − true| ÷ true, a layer's that
of the mean over its tokens.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from estimator import load
from side_by_side import WINDOW
from torch import Tensor, nn

from quantwatch.capture.readout import readout_of
from quantwatch.config.schema import SuiteConfig
from quantwatch.domain import FINAL_NORM
from quantwatch.models.loaded import LoadedModel
from quantwatch.prompts.loading import load_suite
from quantwatch_kernels.compare.lens import LensStatistics, Readout, lens_statistics
from quantwatch_kernels.compare.rounding import Factors
from quantwatch_kernels.registry import fallbacks

ROWS = 32
WAYS: tuple[Factors, ...] = ("bfloat16", "int16", "float32")
BUDGET = {
    "bfloat16": {"layer": 0.01, "median_token": 0.01},
    "int16": {"layer": 0.0005, "median_token": 0.0005},
}


def windows(model: LoadedModel, tokens: int) -> list[list[int]]:
    """Return so many tokens of core-v1, spread over its prompts, in windows."""
    suite = load_suite(
        SuiteConfig(name="core-v1"), model.tokenizer, base_dir=Path(), max_positions=8192
    )
    ids = [i for prompt in suite.prompts for i in prompt.token_ids]
    step = max(WINDOW, len(ids) * WINDOW // tokens)
    return [ids[first : first + WINDOW] for first in range(0, len(ids) - WINDOW, step)]


def layers(model: LoadedModel, texts: list[list[int]]) -> list[Tensor]:
    """Return every layer's output, float32 [tokens, H]."""
    found: list[list[Tensor]] = []
    last: list[Tensor] = []
    norm: nn.Module = model.module.get_submodule(model.anatomy.taps[FINAL_NORM])
    hook = norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    for ids in texts:
        out = model.module(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        # The last one of them went through the norm already.
        found.append([*out.hidden_states[1:-1], last.pop()])
    hook.remove()
    return [torch.cat([x[0].float() for x in each]) for each in zip(*found, strict=True)]


def truth(readout: Readout, weight: Tensor, h: Tensor, other: Tensor) -> LensStatistics:
    """Return KL and deviations from products in float64."""
    found = []
    for pair in zip(torch.split(h, ROWS), torch.split(other, ROWS), strict=True):
        z, y = (readout.normed(x).double() @ weight.t() for x in pair)
        gaps = (z - y).abs().gather(-1, z.topk(5, dim=-1).indices)
        log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        found.append(torch.stack([kl, gaps.mean(-1), gaps[:, :3].mean(-1)]))
    return LensStatistics(*torch.cat(found, dim=1))


def errors(found: Tensor, right: Tensor) -> dict[str, float]:
    token = ((found - right) / right).abs()
    return {
        "layer": abs(float(found.mean() / right.mean()) - 1),
        "median_token": float(token.median()),
        "p99_token": float(token.quantile(0.99)),
        "worst_token": float(token.max()),
    }


def worst(each: list[dict[str, float]]) -> dict[str, Any]:
    """Return the worst layer's error and the median layer's, by kind of error."""
    return {
        kind: {
            "worst": max(e[kind] for e in each),
            "of_layer": max(range(len(each)), key=lambda n: each[n][kind]),
            "median": sorted(e[kind] for e in each)[len(each) // 2],
        }
        for kind in each[0]
    }


def measure(name: str, reference: LoadedModel, theirs: list[Tensor], texts: Any) -> dict[str, Any]:
    readout = readout_of(reference)
    assert isinstance(readout.head, nn.Linear)
    weight = readout.head.weight.double()
    kl: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    k5: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for h, other in zip(theirs, layers(load(name), texts), strict=True):
        right = truth(readout, weight, h, other)
        for way in WAYS:
            found = lens_statistics(h, other, readout, products=way)
            kl[way].append(errors(found.kl, right.kl))
            k5[way].append(errors(found.topk_logit_deviation_k5, right.topk_logit_deviation_k5))
    return {
        way: {"lens_kl": worst(kl[way]), "topk_logit_deviation_k5": worst(k5[way])} for way in WAYS
    }


def main() -> None:
    """Print the errors of the given candidates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--candidates", nargs="+", default=["int8-channel", "int4-g64", "bfloat16"])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        reference = load("reference")
        texts = windows(reference, chosen.tokens)
        theirs = layers(reference, texts)
        found = {name: measure(name, reference, theirs, texts) for name in chosen.candidates}
    said = {"tokens": sum(map(len, texts)), "layers": len(theirs), "budget": BUDGET}
    # Another back end than the native one has the same rounding, but it isn't what is asked for.
    print(json.dumps({**said, "fallbacks": len(fallbacks()), **found}, indent=2))


if __name__ == "__main__":
    main()
