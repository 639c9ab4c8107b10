"""What streaming layers costs beside resident models, and how little memory it takes. Prints JSON.

A generated model of at least `--gigabytes` (float32, random weights) is the reference, itself with
one weight scaled the candidate. Each measurement is a process of its own, resident and streamed
taking turns, the checkpoint read into the page cache before each.

A streamed process may have as much data (RLIMIT_DATA) as the target says and no more: what it has
once everything was imported and used on a tiny model, and embeddings, head, three layers and
activations. Both models' embeddings and heads have to fit into that: one set is granted. What the
activations take is measured where nothing is streamed: the peak of a resident process beyond what
it has when its models are loaded, blocks that were freed given back (as streaming does; the timed
resident ones allocate as they always do). That a resident one can't do with it is tried too.
"""

import argparse
import gc
import hashlib
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

WIDTH, INNER, HEADS, VOCABULARY, PROMPT = 1024, 4096, 16, 4096, 128
LAYER_BYTES = 4 * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH)
OUTSIDE_BYTES = 4 * (2 * VOCABULARY * WIDTH + WIDTH)
FAULT: Any = {"scope": "layers.1.mlp.down_proj", "scale": 1.05}
TARGET = 1.5
_TIMES = ("wall_s", "cpu_s")
_SAMPLED_S = 0.01
_GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}


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
    """Measure in at most `room` bytes (0: any number) more than it takes to be ready.

    Prints a JSON object at the end of each phase, which the parent's eye on the memory needs.
    """
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
        zip(_TIMES, (now - then for now, then in zip(_clocks(), began, strict=True)), strict=True)
    )


class _Quiet:
    def start(self, stage: str, total_tokens: int) -> None:
        pass

    def advance(self, tokens: int) -> None:
        pass


def _tell(phase: str, **more: Any) -> int:
    """Print that a phase is over and what the process has now; return its data, bytes."""
    data = _status("self")["VmData"]
    print(json.dumps({phase: {"data": data, **more}}), flush=True)
    return data


def _status(process: int | str) -> dict[str, int]:
    """Return a process's memory by the kernel's names, bytes; nothing once it has ended."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines if line.startswith(("VmData", "VmHWM", "RssAnon")))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def measured(
    place: Path, memory: str, tokens: int, room: int = 0, **environment: str
) -> dict[str, Any]:
    """Run a process; return what it told by phase, its peaks after `loaded` and in all, bytes."""
    for path in (place / "model").iterdir():  # into the page cache
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    command = [sys.executable, __file__, "--child", str(place), "--memory", memory]
    command += ["--tokens", str(tokens), "--room", str(room)]
    told: dict[str, Any] = {}
    peaks: dict[str, dict[str, int]] = {"capture": {}, "whole": {}}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **environment},
        ) as process,
    ):
        assert process.stdout is not None
        while True:
            if select.select([process.stdout], [], [], _SAMPLED_S)[0]:
                line = process.stdout.readline()
                if not line:
                    break
                told |= json.loads(line)
            for name, size in _status(process.pid).items():
                for part in ("capture", "whole") if "loaded" in told else ("whole",):
                    peaks[part][name] = max(peaks[part].get(name, 0), size)
        if process.wait():
            errors.seek(0)
            lines = errors.read().strip().splitlines() or [f"exit status {process.returncode}"]
            return {"failed": f"after {list(told)}: {lines[-1][:300]}"}
    return {**told, "peaks": peaks}


def compared(place: Path, num_bytes: int, layers: int, options: Any) -> dict[str, Any]:
    """Measure resident and streamed in turns, the streamed ones in what the target grants."""
    tokens = options.tokens // PROMPT * PROMPT
    runs: dict[str, list[Any]] = {"resident": [], "streamed": []}
    plain = measured(place, "resident", tokens, **_GIVEN_BACK)
    _note("resident, freed blocks given back", plain)
    if "failed" in plain:
        return {"failed": plain}
    activations = plain["peaks"]["capture"]["VmData"] - plain["loaded"]["data"]
    room = OUTSIDE_BYTES + 3 * LAYER_BYTES + activations
    for number in range(options.rounds):
        for kind in list(runs)[:: -1 if number % 2 else 1]:  # who is first takes turns
            run = measured(place, kind, tokens, room if kind == "streamed" else 0)
            _note(kind, run)
            if "failed" in run:
                return {"failed": {kind: run["failed"]}, "room_mb": _mb(room)}
            runs[kind].append(run)
    ready = max(run["ready"]["data"] for run in runs["streamed"])
    if ready + room >= num_bytes:
        return {"failed": f"{_mb(ready + room)} MB are no less than the model"}
    pairs = list(zip(runs["resident"], runs["streamed"], strict=True))
    return {
        "num_layers": layers,
        "num_tokens": tokens,
        "model_mb": _mb(num_bytes),
        "bound_mb": {
            "interpreter": _mb(ready),
            "embeddings_and_head": _mb(OUTSIDE_BYTES),
            "three_layers": _mb(3 * LAYER_BYTES),
            "activations": _mb(activations),
            "all_is_the_limit": _mb(ready + room),
            "all_but_the_interpreter": _mb(room),
        },
        "hidden_states_kept_mb": _mb(4 * tokens * WIDTH * (3 * layers + 3)),
        "interpreter_when_imported_mb": _mb(runs["streamed"][0]["imported"]["data"]),
        "streamed_mb": {
            "peak": _mb(max(r["peaks"]["whole"]["VmData"] for r in runs["streamed"])),
            "peak_but_the_interpreter": _mb(
                max(r["peaks"]["whole"]["VmData"] - r["ready"]["data"] for r in runs["streamed"])
            ),
            "when_loaded": _mb(max(r["loaded"]["data"] for r in runs["streamed"])),
        },
        "peaks_mb": {
            kind: {
                n: _mb(max(r["peaks"]["whole"][n] for r in each)) for n in each[0]["peaks"]["whole"]
            }
            for kind, each in runs.items()
        },
        "resident_under_the_limit": measured(place, "resident", tokens, room).get(
            "failed", "ran: the limit holds nothing back"
        ),
        "seconds": {
            kind: {
                f"{part}_{clock}": round(median(r[where][part][clock] for r in each), 2)
                for part, where in (("load", "loaded"), ("capture", "measured"))
                for clock in _TIMES
            }
            for kind, each in runs.items()
        },
        "streamed_to_resident": {
            clock: [round(_whole(s, clock) / _whole(r, clock), 3) for r, s in pairs]
            for clock in _TIMES
        },
        "equal_blocks": all(r["measured"]["digest"] == s["measured"]["digest"] for r, s in pairs),
        "logit_kl": pairs[0][1]["measured"]["logit_kl"],
        "target": {"streamed_to_resident": TARGET},
    }


def _note(kind: str, run: Any) -> None:
    print(kind, os.getloadavg()[0], json.dumps(run), file=sys.stderr, flush=True)


def _whole(run: dict[str, Any], clock: str) -> float:
    return float(run["loaded"]["load"][clock] + run["measured"]["capture"][clock])


def _mb(size: int) -> float:
    return round(size / 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.05)
    parser.add_argument("--tokens", type=int, default=512, help="in prompts of 128, one batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the model: must have its size free")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--room", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, options.memory, options.tokens, options.room)
        return
    layers = -int(-options.gigabytes * 1e9 // LAYER_BYTES)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="quantwatch-streaming-", dir=options.folder) as name:
        place = Path(name)
        generate(place / "tiny", 2, width=64, inner=256)
        num_bytes = generate(place / "model", layers)
        document = compared(place, num_bytes, layers, options)
    load = {"before": round(before, 1), "after": round(os.getloadavg()[0], 1)}
    print(json.dumps({"num_threads": 1, "load": load, **document}, indent=2, allow_nan=False))


if __name__ == "__main__":
    main()
