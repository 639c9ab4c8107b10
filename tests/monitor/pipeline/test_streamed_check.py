"""A check of models that don't fit: same results, in a process that may not hold a model."""

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.monitor.tiny_models import save_word_model

import quantwatch
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import Block
from quantwatch.errors import ConfigError, ModelError
from quantwatch.pipeline import RunRequest, estimate, run_check
from quantwatch.pipeline.measure import measure_check
from quantwatch.store.session import Database

NUM_WORDS = 96
FAULT = {"scope": "layers.1.mlp.down_proj", "scale": 1.2}


class Quiet:
    def start(self, stage: str, total_tokens: int) -> None:
        pass

    def advance(self, tokens: int) -> None:
        pass


def _request(folder: Path, *candidates: dict[str, Any], **settings: Any) -> RunRequest:
    check = CheckConfig.model_validate(
        {
            "reference": {"model": "tiny"},
            "candidates": candidates
            or [
                {"name": "int8", "model": "tiny", "recipe": "int8-channel"},
                {"name": "faulty", "model": "tiny", "faults": [FAULT]},
            ],
            "suite": {"files": ["prompts.json"]},
            **settings,
        }
    )
    return RunRequest("streamed", check, folder, folder / "cache")


def _measured(request: RunRequest) -> tuple[list[Block], Any, Any]:
    with measure_check(request, Quiet()) as measured:
        return list(measured.blocks()), dict(measured.floor), measured.models


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk": 5}], ids=["whole", "in chunks"])
def test_a_streamed_check_stores_the_same_numbers(folder: Path, settings: dict[str, Any]) -> None:
    """Catches a measurement that reads a layer before its values are there or after they went."""
    blocks, floor, models = _measured(_request(folder, **settings))
    streamed, streamed_floor, others = _measured(_request(folder, memory="streamed", **settings))
    assert len(blocks) == len(streamed) > 50
    for ours, theirs in zip(streamed, blocks, strict=True):
        assert (ours.kind, ours.metric, ours.prompt) == (theirs.kind, theirs.metric, theirs.prompt)
        np.testing.assert_array_equal(ours.values, theirs.values, err_msg=ours.metric)
    assert streamed_floor == floor
    for name, model in models.candidates.items():
        assert others.candidates[name].variant.fingerprint == model.variant.fingerprint
    assert others.reference.variant.fingerprint == models.reference.variant.fingerprint


def test_runs_of_both_kinds_are_judged_alike(folder: Path, database: Database) -> None:
    """Catches a setting that makes two runs of one check incomparable."""
    stored = [
        run_check(_request(folder, memory=memory), database=database, progress=Quiet())
        for memory in ("resident", "streamed")
    ]
    one, other = stored
    assert one.verdict == other.verdict
    assert one.capture_sha == other.capture_sha


def test_a_candidate_that_cannot_be_streamed_says_so(folder: Path) -> None:
    """Catches a candidate that is made resident unasked."""
    gptq = {
        "weights": "int4", "granularity": "group", "group_size": 16, "method": "gptq",
        "calibration": {"suite": {"files": ["prompts.json"]}},
    }  # fmt: skip
    bad = {"name": "gptq", "model": "tiny", "recipe": gptq}
    good = {"name": "int8", "model": "tiny", "recipe": "int8-channel"}
    _, _, models = _measured(_request(folder, bad, good, memory="streamed"))
    assert "int4-g16-gptq can't be streamed" in models.failures["gptq"]
    with pytest.raises(ModelError, match="int4-g16-gptq can't be streamed"):
        _measured(_request(folder, bad, memory="streamed"))


def test_modules_in_memory_are_not_streamed() -> None:
    with pytest.raises(ConfigError, match="the modules are in memory"):
        quantwatch.compare(None, None, [[1, 2]], memory="streamed")  # type: ignore[arg-type]


def test_estimate_is_of_three_layers(tmp_path: Path) -> None:
    """Catches an estimate that refuses a model for its size though it is streamed."""
    save_word_model(tmp_path / "tiny", NUM_WORDS, num_hidden_layers=8)
    (tmp_path / "prompts.json").write_text(json.dumps(["w1 w2 w3 w4 w5 w6"]))
    whole = estimate(_request(tmp_path)).memory_bytes
    streamed = estimate(_request(tmp_path, memory="streamed")).memory_bytes
    # q, k, v, o of 32 × 32 with half as many keys; gate, up, down of 32 × 64; two norms.
    layer = 4 * (32 * 32 * 3 + 3 * 32 * 64 + 2 * 32)
    assert whole is not None
    assert streamed is not None
    assert whole - streamed == 3 * 5 * layer


CHILD = textwrap.dedent(
    """
    import resource, sys, threading
    from pathlib import Path
    # A stack is 8 MB of which a thread uses little, and how many threads overlap is chance.
    threading.stack_size(1 << 20)
    import torch
    from tests.monitor.pipeline.test_streamed_check import _measured, _request

    def data():
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmData")).split()[1])

    torch.set_num_threads(1)
    small, big, memory, room = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    candidate = {"name": "same", "model": "tiny", "faults": [
        {"scope": "layers.1.mlp.down_proj", "scale": 1.2}]}
    for kind in ("resident", "streamed"):  # imports, threads and buffers of libraries
        _measured(_request(small, candidate, memory=kind))
    limit = data() + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    blocks, _, _ = _measured(_request(big, candidate, memory=memory))
    print(len(blocks), sum(float(abs(b.values).max()) > 0 for b in blocks if b.values.size))
    """
)
WIDE = {
    **{"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12},
    **{"num_attention_heads": 8, "num_key_value_heads": 8},
}
LAYER = 4 * (4 * 512 * 512 + 3 * 512 * 2048 + 2 * 512)
OUTSIDE = 4 * (2 * NUM_WORDS * 512 + 512)
ACTIVATIONS = 24 << 20


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 200 MB and four prompts."""
    folder = tmp_path_factory.mktemp("big")
    save_word_model(folder / "tiny", NUM_WORDS, **WIDE)
    texts = [" ".join(f"w{(i * 7 + j) % 90}" for j in range(16)) for i in range(4)]
    (folder / "prompts.json").write_text(json.dumps(texts))
    assert (folder / "tiny" / "model.safetensors").stat().st_size > 200e6
    return folder


def _child(folder: Path, big: Path, memory: str, room: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(folder), str(big), memory, str(room)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone")
def test_two_models_in_the_memory_of_three_layers(folder: Path, big: Path) -> None:
    """Catches layers that pile up: 200 MB twice, in room for a third of one of them."""
    room = OUTSIDE * 2 + 3 * LAYER + ACTIVATIONS
    assert room < 0.4 * (big / "tiny" / "model.safetensors").stat().st_size
    done = _child(folder, big, "streamed", room)
    assert done.returncode == 0, done.stderr[-2000:]
    count, moved = map(int, done.stdout.split())
    assert count > 40
    assert moved > 10
    resident = _child(folder, big, "resident", room)
    assert resident.returncode != 0, "the limit holds nothing back"
    assert "memory" in resident.stderr.lower()


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_behind(folder: Path) -> None:
    """Catches copies of layers on disk: whatever a stream needs is in memory or in the checkpoint."""
    code = CHILD.replace("print(len(blocks)", "print('done'); print(len(blocks)").replace(
        "blocks, _, _ =", "print('begun', flush=True)\nwhile True: blocks, _, _ ="
    )
    command = [sys.executable, "-c", code, str(folder), str(folder), "streamed", str(1 << 30)]
    before = {path for path in folder.rglob("*") if "spool" not in path.parts}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        time.sleep(0.3)
        child.send_signal(signal.SIGKILL)
    after = {path for path in folder.rglob("*") if "spool" not in path.parts}
    assert {p for p in after - before if "shas" not in p.parts and p.name != "cache"} == set()
    blocks, _, _ = _measured(_request(folder, memory="streamed"))
    assert blocks
