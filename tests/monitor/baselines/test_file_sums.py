"""Prompt sums through a file: bit for bit, or one clear line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantwatch.baselines.files import export_run, import_run, import_sums
from quantwatch.domain import Block, RunResult, Scope
from quantwatch.errors import UserError


@pytest.fixture
def file(tmp_path: Path, run: Callable[..., RunResult]) -> Path:
    path = tmp_path / "run.json"
    values = np.random.default_rng(0).normal(size=(3, 2, 4))
    values[0, 0, 3] = np.nan
    scopes = (Scope("layers.0"), Scope("layers.1"))
    export_run(run(), path, [Block("int8", "per_prompt", "rel_error", None, scopes, values)])
    return path


def test_sums_come_back_bit_for_bit(file: Path, run: Callable[..., RunResult]) -> None:
    """Catches rounding, byte order, and NaN (no finite value) that becomes something else."""
    (block,) = import_sums(file)
    assert (block.candidate, block.metric, block.scopes) == (
        "int8", "rel_error", ("layers.0", "layers.1"),
    )  # fmt: skip
    expected = np.random.default_rng(0).normal(size=(3, 2, 4))
    expected[0, 0, 3] = np.nan
    assert np.array_equal(block.values, expected, equal_nan=True)
    assert import_run(file).run_id == run().run_id


def test_a_file_without_sums_is_still_a_baseline(
    tmp_path: Path, run: Callable[..., RunResult]
) -> None:
    """Catches baselines of yesterday that can no longer be read."""
    export_run(run(), tmp_path / "old.json")
    assert import_sums(tmp_path / "old.json") == ()


BROKEN = [
    ("no list", lambda _: {}, "list"),
    ("a key is missing", lambda rows: [{**rows[0], "data": None}], "string"),
    ("not base64", lambda rows: [{**rows[0], "data": "***"}], "can't be unpacked"),
    ("not compressed", lambda rows: [{**rows[0], "data": "AAAA"}], "can't be unpacked"),
    ("too short", lambda rows: [{**rows[0], "num_prompts": 4}], "192 bytes where 256"),
    ("too long", lambda rows: [{**rows[0], "num_prompts": 2}], "129 bytes where 128"),
    ("a bomb", lambda rows: [{**rows[0], "num_prompts": 10**9}], "are allowed"),
    ("negative", lambda rows: [{**rows[0], "num_prompts": -1}], "are allowed"),
]


@pytest.mark.parametrize(("change", "words"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_damaged_sums_are_one_clear_line(file: Path, change: Any, words: str) -> None:
    """Catches a traceback, or memory filled by a file that lies about its size."""
    document = json.loads(file.read_text())
    document["prompt_sums"] = change(document["prompt_sums"])
    file.write_text(json.dumps(document))
    with pytest.raises(UserError, match=words):
        import_sums(file)
