"""What a run and its workers send each other, and what can't come of it."""

import io
import os
import pickle
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantwatch.config.schema import CheckConfig
from quantwatch.domain import MODEL, Observation, TokenMatrix
from quantwatch.errors import ModelError, WorkersLostError
from quantwatch.pipeline import RunRequest
from quantwatch.pipeline.executors import frames


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
