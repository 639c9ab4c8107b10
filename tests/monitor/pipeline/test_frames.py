"""What a run and its workers send each other, and what can't come of it."""

import io
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from quantwatch.config.schema import CheckConfig
from quantwatch.domain import MODEL, Observation, TokenMatrix
from quantwatch.errors import ModelError, WorkersLostError
from quantwatch.pipeline import RunRequest
from quantwatch.pipeline.executors import frames, local
from quantwatch.pipeline.executors.job import Failed


class Called:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


CHECK = CheckConfig.model_validate(
    {
        "suite": {"name": "core-v1:demo"},
        "reference": {"model": "a"},
        "candidates": [{"name": "b", "model": "b", "recipe": "int8-channel"}],
        "rules": [{"name": "kl", "metric": "logit_kl", "threshold": 0.1, "severity": "critical"}],
        "schedule": {"cron": "0 2 * * *"},
        "alerting": {"maintenance": [{"cron": "0 3 * * *", "length": "1h"}]},
        "canary": {"size": 0.02},
    }
)
VALUES: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, "w", b"x", (True, frozenset({1}))], "counted": Counter("aab")},
    "check": RunRequest("nightly", CHECK, Path("/base"), Path("/cache")),
    "error": ModelError("layer 3 has no weight"),
    "error with more": WorkersLostError("gone", 4),
    "error of the system": OSError(28, "No space left on device"),
    "error of torch": torch.OutOfMemoryError("1 GiB wanted"),
}
NOT_VALUES: dict[str, Any] = {
    "a command": Called(os.system, "true"),
    "a process": Called(subprocess.Popen, ("true",)),
    "code": Called(eval, "1"),
    "a function of our own": Called(frames.packed, 1),
    "a reader of attributes": Called(getattr, "a", "upper"),
    "a class of somebody's": io.StringIO("a"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_arrive(name: str) -> None:
    """Catches a setting or an error that no worker can be told."""
    value = VALUES[name]
    found = frames.unpacked(frames.packed(value))
    assert type(found) is type(value)
    assert str(found) == str(value)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "bool"])
def test_arrays_arrive(dtype: str, order: Any) -> None:
    """Catches values that lost a bit, or can't be written to any more."""
    values = np.arange(6).reshape(2, 3).astype(dtype, order=order)
    sent = Observation("b", 3, (TokenMatrix("logit_kl", (MODEL,), values),))

    (found,) = frames.unpacked(frames.packed(sent)).matrices

    assert found.values.dtype == values.dtype
    assert found.values.tobytes() == values.tobytes()
    assert found.values.flags.writeable
    assert frames.unpacked(frames.packed(np.float64(0.1))) == np.float64(0.1)


@pytest.mark.parametrize("name", NOT_VALUES)
def test_what_is_no_value_is_refused(name: str) -> None:
    """Catches bytes that run something when they are read (B07)."""
    with pytest.raises(ValueError, match="no value that a run and its workers send"):
        frames.unpacked(pickle.dumps(NOT_VALUES[name]))


def test_a_name_leads_nowhere_else() -> None:
    """Catches a walk from one of our modules to what it imports."""
    through = b"\x80\x04\x8c\x26quantwatch.pipeline.executors.sharding\x8c\x09os.system\x93."
    with pytest.raises(ValueError, match=r"os\.system is no value"):
        frames.unpacked(through)
    imported = b"\x80\x04cquantwatch.pipeline.executors.local\nsubprocess\n."
    with pytest.raises(ValueError, match="subprocess is no value"):
        frames.unpacked(imported)


_WHOLE = frames.packed(VALUES["check"])
BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "half": _WHOLE[: len(_WHOLE) // 2],
    "no pickle": b"Traceback (most recent call last):\n",
    "a module that is gone": _WHOLE.replace(b"quantwatch.pipeline", b"quantwatch.pipelins"),
    "a class that is gone": _WHOLE.replace(b"RunRequest", b"RunRequesu"),
    "a constructor that wants more": pickle.dumps(Called(WorkersLostError)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_one_kind_of_error(name: str) -> None:
    """Catches a thread that ends by an error nobody foresaw: the run waits for it for ever."""
    with pytest.raises(ValueError, match="no value"):
        frames.unpacked(BROKEN[name])


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


def _sends(data: bytes) -> tuple[str, ...]:
    """A process that sends bytes in place of what a worker measured."""
    code = f"import os, sys; os.write(int(sys.argv[2]), {data!r}); sys.stdin.buffer.read()"
    return sys.executable, "-c", code


SENT = {name: _frame(data) for name, data in BROKEN.items()} | {"a length": b"\xff" * 8}


@pytest.mark.parametrize("name", SENT)
def test_a_worker_that_sends_what_cannot_be_read_ends_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "COMMAND", _sends(SENT[name]))
    crew = local.LocalCrew(cast(Any, {}), 1)
    try:
        event = crew.wait(20)
        assert isinstance(event, Failed)
        assert isinstance(event.error, ValueError)
    finally:
        crew.close()


@pytest.mark.parametrize("name", ["half", "a class that is gone", "a length"])
def test_a_worker_that_cannot_read_its_job_ends(name: str) -> None:
    """Catches one that waits for a job that came: another release was installed meanwhile."""
    inlet, outlet = os.pipe()
    try:
        command = (*local.COMMAND, "0", str(outlet))
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(outlet,)
        ) as worker:
            assert worker.stdin is not None
            assert worker.stderr is not None
            worker.stdin.write(SENT[name])
            worker.stdin.flush()
            try:
                assert worker.wait(120) == 1
            finally:
                worker.kill()
            assert b"ValueError" in worker.stderr.read()
    finally:
        os.close(inlet)
        os.close(outlet)
