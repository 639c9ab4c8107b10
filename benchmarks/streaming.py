"""What streaming layers costs beside resident models, and how little memory it takes. Prints JSON.

A generated model of at least `--gigabytes` (float32, random weights) is the reference, itself with
one weight scaled the candidate. Each measurement is a process of its own, resident and streamed in
turn, with the checkpoint in the page cache. The streamed ones run under RLIMIT_DATA, set before
anything is imported, to less than the model's size; that a resident one can't is tried as well.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

WIDTH, INNER, HEADS, VOCABULARY = 1024, 4096, 16, 4096
LAYER_BYTES = 4 * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH)
OUTSIDE_BYTES = 4 * (2 * VOCABULARY * WIDTH + WIDTH)
PROMPT = 128
FAULT: Any = {"scope": "layers.1.mlp.down_proj", "scale": 1.05}


def generate(folder: Path, gigabytes: float) -> int:
    """Write a checkpoint in shards, a layer of values at a time; return its bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = -int(-gigabytes * 1e9 // LAYER_BYTES)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    parts: dict[str, list[str]] = {}
    for name in shapes:
        found = name.split(".")
        place = f"layer-{int(found[2]) // 4:03}" if found[1] == "layers" else "rest"
        parts.setdefault(f"model-{place}.safetensors", []).append(name)
    torch.manual_seed(0)
    for file, names in parts.items():
        save_file({n: _values(n, shapes[n]) for n in names}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: f for f, names in parts.items() for n in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _values(name: str, shape: Any) -> Any:
    import torch

    return torch.ones(shape) if "norm" in name else torch.randn(shape) * 0.02


def child(folder: Path, memory: str, tokens: int, limit: int) -> None:
    """Load two models and measure; print seconds and bytes."""
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    import torch

    from quantwatch.capture.plan import CapturePlan
    from quantwatch.capture.side_by_side import capture_suite
    from quantwatch.config.schema import VariantConfig
    from quantwatch.metrics.aggregate import Aggregator
    from quantwatch.metrics.floor import NoiseFloor
    from quantwatch.models.loading import load_variant
    from quantwatch.prompts.loading import suite_from_token_ids

    torch.set_num_threads(1)
    base, cache = folder, folder.parent / "cache"
    started = time.perf_counter()
    configs = {
        "reference": VariantConfig(model=str(folder)),
        "faulty": VariantConfig(model=str(folder), faults=(FAULT,)),
    }
    models = {
        name: load_variant(
            name, config, base_dir=base, cache_dir=cache, streamed=memory == "streamed"
        )
        for name, config in configs.items()
    }
    loaded = time.perf_counter()
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (max(1, tokens // PROMPT), PROMPT)).tolist()
    suite = suite_from_token_ids(ids, None, num_tokens=VOCABULARY)
    plan = replace(CapturePlan(), batch_tokens=tokens)
    with Aggregator(suite, cache / "spool") as sink:
        capture_suite(models, suite, plan, sink, NoiseFloor(), _Quiet())
        kl = [float(b.values.mean()) for b in sink.blocks("faulty") if b.metric == "logit_kl"]
    seconds = {"load_s": loaded - started, "capture_s": time.perf_counter() - loaded}
    print(json.dumps({**seconds, "peak_rss_mb": _peak_mb(), "kl": kl}))


class _Quiet:
    def start(self, stage: str, total_tokens: int) -> None:
        pass

    def advance(self, tokens: int) -> None:
        pass


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(folder: Path, memory: str, tokens: int, limit: int = 0) -> Any:
    command = [sys.executable, __file__, "--child", str(folder), "--memory", memory]
    command += ["--tokens", str(tokens), "--limit", str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"failed": lines[-1][:200] if lines else f"exit status {done.returncode}"}
    return json.loads(done.stdout)


def compared(folder: Path, num_bytes: int, tokens: int, rounds: int) -> Any:
    limit = num_bytes // 2
    runs: dict[str, list[Any]] = {"resident": [], "streamed": []}
    limits = {"resident": 0, "streamed": limit}
    for number in range(rounds):
        for kind in list(runs)[:: -1 if number % 2 else 1]:  # who is first takes turns
            runs[kind].append(measured(folder, kind, tokens, limits[kind]))
    under_limit = measured(folder, "resident", tokens, limit)
    failed = [run for each in runs.values() for run in each if "failed" in run]
    if failed:
        return {"failed": failed}
    pairs = list(zip(runs["resident"], runs["streamed"], strict=True))
    return {
        "model_mb": round(num_bytes / 2**20, 1),
        "outside_and_three_layers_mb": round((OUTSIDE_BYTES + 3 * LAYER_BYTES) / 2**20, 1),
        "limit_data_mb": round(limit / 2**20, 1),
        "resident_under_limit": under_limit.get("failed", "ran: the limit holds nothing back"),
        "num_tokens": tokens,
        "seconds": {
            kind: {key: round(median(r[key] for r in each), 2) for key in ("load_s", "capture_s")}
            for kind, each in runs.items()
        },
        "peak_rss_mb": {k: round(max(r["peak_rss_mb"] for r in e), 1) for k, e in runs.items()},
        "capture_ratio": round(median(s["capture_s"] / r["capture_s"] for r, s in pairs), 3),
        "whole_ratio": round(median(_whole(s) / _whole(r) for r, s in pairs), 3),
        "equal_kl": all(r["kl"] == s["kl"] for r, s in pairs),
        "target": {"capture_ratio": 1.5},
    }


def _whole(run: Any) -> float:
    return float(run["load_s"] + run["capture_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.05)
    parser.add_argument("--tokens", type=int, default=1024, help="in prompts of 128, one batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, options.memory, options.tokens, options.limit)
        return
    with tempfile.TemporaryDirectory(prefix="quantwatch-streaming-") as place:
        folder = Path(place) / "model"
        num_bytes = generate(folder, options.gigabytes)
        document = compared(folder, num_bytes, options.tokens, options.rounds)
    print(json.dumps({"num_threads": 1, **document}, indent=2, allow_nan=False))


if __name__ == "__main__":
    main()
