"""One process of benchmarks/streaming.py: models made, loaded and measured, nothing compared.

Prints a JSON object at the end of each phase, which the parent's eye on the memory needs.
"""

import argparse
import gc
import hashlib
import json
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

WIDTH, INNER, HEADS, VOCABULARY, PROMPT = 1024, 4096, 16, 4096, 128
FAULT: Any = {"scope": "layers.1.mlp.down_proj", "scale": 1.05}
CLOCKS = ("wall_s", "cpu_s")


def generate(folder: Path, layers: int, width: int = WIDTH, inner: int = INNER) -> int:
    """Write a checkpoint in shards of four layers, one at a time; return its bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
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


def child(place: Path, memory: str, tokens: int, room: int) -> None:
    """Measure in at most `room` bytes (0: any number) more than it takes to be ready."""
    import torch

    from quantwatch.capture.side_by_side import capture_suite  # noqa: F401

    torch.set_num_threads(1)
    _tell("imported")
    # What is imported late, threads, buffers of libraries. Of the same kind: streaming changes how
    # the process allocates.
    _measure(place / "tiny", memory, PROMPT * 2)
    gc.collect()
    ready = _tell("ready")
    if room:
        resource.setrlimit(resource.RLIMIT_DATA, (ready + room, ready + room))
    _tell("measured", **_measure(place / "model", memory, tokens, tell=_tell))


def _measure(folder: Path, memory: str, tokens: int, tell: Any = lambda *_, **__: None) -> Any:
    """Load two models and capture; return all results' digest, and tell seconds of both."""
    import torch

    from quantwatch.capture.plan import CapturePlan
    from quantwatch.capture.side_by_side import capture_suite
    from quantwatch.config.schema import VariantConfig
    from quantwatch.metrics.aggregate import Aggregator
    from quantwatch.metrics.floor import NoiseFloor
    from quantwatch.models.loading import load_variant
    from quantwatch.prompts.loading import suite_from_token_ids

    cache = folder.parent / "cache"
    began = _clocks()
    configs = {
        "reference": VariantConfig(model=str(folder)),
        "faulty": VariantConfig(model=str(folder), faults=(FAULT,)),
    }
    models = {
        name: load_variant(
            name, config, base_dir=folder, cache_dir=cache, streamed=memory == "streamed"
        )
        for name, config in configs.items()
    }
    tell("loaded", load=_since(began))
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (tokens // PROMPT, PROMPT)).tolist()
    suite = suite_from_token_ids(ids, None, num_tokens=VOCABULARY)
    plan = replace(CapturePlan(), batch_tokens=tokens)
    began = _clocks()
    with Aggregator(suite, cache / "spool") as sink:
        capture_suite(models, suite, plan, sink, NoiseFloor(), _Quiet())
        spent = _since(began)
        digest = hashlib.sha256()
        for block in sink.blocks("faulty"):
            digest.update(f"{block.kind} {block.metric} {block.prompt} ".encode())
            digest.update(block.values.tobytes())
        rows = sink.measurements("faulty")
        kl = next(row.mean for row in rows if row.metric == "logit_kl")
    return {"capture": spent, "digest": digest.hexdigest(), "logit_kl": kl}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> dict[str, float]:
    return dict(
        zip(CLOCKS, (now - then for now, then in zip(_clocks(), began, strict=True)), strict=True)
    )


class _Quiet:
    def start(self, stage: str, total_tokens: int) -> None:
        pass

    def advance(self, tokens: int) -> None:
        pass


def _tell(phase: str, **more: Any) -> int:
    """Print that a phase is over and what the process has now; return its data, bytes."""
    data = status("self")["VmData"]
    print(json.dumps({phase: {"data": data, **more}}), flush=True)
    return data


def status(process: int | str) -> dict[str, int]:
    """Return a process's memory by the kernel's names, bytes; nothing once it has ended."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines if line.startswith(("VmData", "VmHWM", "RssAnon")))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", type=Path, help="the folder of the folders `tiny` and `model`")
    parser.add_argument("--memory", choices=("resident", "streamed"), required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--room", type=int, default=0)
    options = parser.parse_args()
    child(options.place, options.memory, options.tokens, options.room)


if __name__ == "__main__":
    main()
