"""What a long prompt costs in chunks: memory by length, seconds, KL by position. Prints JSON.

A small model made for 32,768 positions (2 layers, width 64, 512 ids) against itself with one matrix
scaled; with `--smollm2` SmolLM2-135M against its INT8 variant, on real text up to its 8,192. Every
figure is of a process of its own: the highest resident memory above the two loaded models while one
prompt goes through them, bare (both models in the same chunks with the same caches, nothing looked
at) and observed. What the keys and values take is subtracted from both.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SMALL, SMOLLM2 = (4096, 16384, 32768), (2048, 4096, 8192)
CHUNK = 64
_MB = 1 << 20
_MAPPED = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc keeps freed blocks of growing size, as masks are, in its heap; mapped ones it returns."""


def child(kind: str, tokens: int, chunk: int, *, observed: bool) -> None:
    """Take one prompt through two models; print the peak above them, in MB, and seconds."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        models = _smollm2(Path(folder)) if kind == "smollm2" else _small()
        suite = _suite(kind, models["reference"], tokens)
        work: Callable[..., Any] = _observed if observed else _bare
        work(models, _suite(kind, models["reference"], 2 * chunk), chunk, Path(folder))  # warm up
        _touch(models)
        gc.collect()
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        started = time.perf_counter()
        found = work(models, suite, chunk, Path(folder))
        found["seconds"] = round(time.perf_counter() - started, 2)
    found["peak_mb"] = round(_status("VmHWM") - before, 2)
    print(json.dumps(found))


def _touch(models: Any) -> None:
    """Read all weights: rows of a mapped embedding would come into memory with their tokens."""
    for model in models.values():
        for weights in (*model.module.parameters(), *model.module.buffers()):
            weights.sum()


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def _small() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from quantwatch.models.loading import from_module

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=32768,
    )
    torch.manual_seed(0)
    reference, candidate = (LlamaForCausalLM(config).eval() for _ in range(2))
    candidate.load_state_dict(reference.state_dict())
    candidate.model.layers[1].mlp.down_proj.weight.mul_(1.05)
    pair = {"reference": reference, "candidate": candidate}
    return {name: from_module(name, module) for name, module in pair.items()}


def _smollm2(folder: Path) -> Any:
    import platformdirs

    from quantwatch.config.schema import VariantConfig
    from quantwatch.models.loading import load_variant

    cache = Path(platformdirs.user_cache_dir("quantwatch"))
    settings: dict[str, Any] = {"reference": {}, "candidate": {"recipe": "int8-channel"}}
    return {
        name: load_variant(
            name, VariantConfig(model="smollm2-135m", **each), base_dir=folder, cache_dir=cache
        )
        for name, each in settings.items()
    }


def _suite(kind: str, reference: Any, tokens: int) -> Any:
    import torch

    from quantwatch.config.schema import SuiteConfig
    from quantwatch.prompts.loading import load_suite, suite_from_token_ids

    if kind == "small":
        ids = torch.randint(0, 512, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    else:
        core = load_suite(
            SuiteConfig(name="core-v1"),
            reference.tokenizer,
            base_dir=Path(),
            max_positions=reference.max_positions,
        )
        ids = [one for prompt in core.prompts for one in prompt.token_ids]
        if len(ids) < tokens:
            raise SystemExit(f"core-v1 has {len(ids)} tokens, {tokens} are wanted")
    return suite_from_token_ids([ids[:tokens]], None, max_positions=reference.max_positions)


def _bare(models: Any, suite: Any, chunk: int, _: Path) -> dict[str, Any]:
    import torch

    from quantwatch.capture.chunks import chunks_of
    from quantwatch.capture.prefill import Prefill, cache_bytes

    (prompt,) = suite.prompts
    kept = {name: Prefill(model, len(prompt.token_ids)) for name, model in models.items()}
    for each in chunks_of(prompt, chunk):
        ids = torch.tensor([each.piece.token_ids])
        for name, model in models.items():
            # Up to the head, as capture does: logits are made of some rows at a time.
            with kept[name].attending(each):
                model.module.model(ids, **kept[name].options(each))
    return {"kv_cache_mb": round(sum(cache_bytes(k.cache) for k in kept.values()) / _MB, 2)}


def _observed(models: Any, suite: Any, chunk: int, folder: Path) -> dict[str, Any]:
    from side_by_side import Quiet

    from quantwatch.capture.plan import CapturePlan
    from quantwatch.capture.side_by_side import capture_suite
    from quantwatch.metrics.aggregate import Aggregator
    from quantwatch.metrics.floor import NoiseFloor

    plan = CapturePlan(prefill_chunk=chunk)
    with Aggregator(suite, folder) as sink:
        capture_suite(models, suite, plan, sink, NoiseFloor(), Quiet())
        captured = _status("VmHWM")
        rows = sink.measurements("candidate")
        ranges = list(sink.by_position("candidate"))
        num_bytes = sum(block.values.nbytes for block in sink.blocks("candidate"))
        later = _status("VmHWM") - captured
    output = [each for each in ranges if each.metric == "logit_kl"]
    return {
        "rows": len(rows),
        "block_mb": round(num_bytes / _MB, 2),
        "more_for_rows_and_blocks_mb": round(later, 2),
        "logit_kl_by_position": {each.name: each.mean for each in output},
        "lens_kl_by_position": {each.name: each.mean for each in ranges if each not in output},
    }


def measured(kind: str, tokens: int, chunk: int) -> dict[str, Any]:
    """Return what one length costs, bare and observed."""
    command = [sys.executable, __file__, "--child", kind, "--lengths", str(tokens)]
    command += ["--chunk", str(chunk)]
    bare, observed = (_output([*command, *more]) for more in ((), ("--observed",)))
    cache = bare["kv_cache_mb"]
    return {
        "tokens": tokens,
        "kv_cache_mb": cache,
        "beyond_kv_mb": round(observed.pop("peak_mb") - cache, 2),
        "bare_beyond_kv_mb": round(bare["peak_mb"] - cache, 2),
        "bare_seconds": bare["seconds"],
        "seconds": observed.pop("seconds"),
        **observed,
    }


def _output(command: list[str]) -> Any:
    done = subprocess.run(command, env=_MAPPED, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M instead; slow")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of the prompts")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens per chunk")
    parser.add_argument("--child", choices=("small", "smollm2"), help=argparse.SUPPRESS)
    parser.add_argument("--observed", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.lengths[0], given.chunk, observed=given.observed)
        return
    kind, usual = ("smollm2", SMOLLM2) if given.smollm2 else ("small", SMALL)
    lengths = [measured(kind, each, given.chunk) for each in given.lengths or usual]
    print(json.dumps({"model": kind, "chunk": given.chunk, "lengths": lengths}, indent=2))


if __name__ == "__main__":
    main()
