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
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import streaming_process
from streaming_process import CLOCKS, INNER, PROMPT, VOCABULARY, WIDTH, generate, status

LAYER_BYTES = 4 * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH)
OUTSIDE_BYTES = 4 * (2 * VOCABULARY * WIDTH + WIDTH)
TARGET = 1.5
_SAMPLED_S = 0.01
_GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}


def measured(
    place: Path, memory: str, tokens: int, room: int = 0, **environment: str
) -> dict[str, Any]:
    """Run a process; return what it told by phase, its peaks after `loaded` and in all, bytes."""
    for path in (place / "model").iterdir():  # into the page cache
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    command = [sys.executable, streaming_process.__file__, str(place), "--memory", memory]
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
            for name, size in status(process.pid).items():
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
                for clock in CLOCKS
            }
            for kind, each in runs.items()
        },
        "streamed_to_resident": {
            clock: [round(_whole(s, clock) / _whole(r, clock), 3) for r, s in pairs]
            for clock in CLOCKS
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
    options = parser.parse_args()
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
