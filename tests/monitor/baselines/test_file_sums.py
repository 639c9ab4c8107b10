"""Prompt sums through a file: bit for bit, or one clear line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantwatch.baselines.file_sums import decode_sums, encode_sums
from quantwatch.baselines.files import export_run, import_run, import_sums
from quantwatch.baselines.paired import Matrix
from quantwatch.domain import Block, RunResult, Scope
from quantwatch.errors import UserError


@pytest.fixture
def file(tmp_path: Path, run: Callable[..., RunResult]) -> Path:
    path = tmp_path / "run.json"
    scopes = (Scope("layers.0"), Scope("layers.1"))
    block = Block("int8", "per_prompt", "rel_error", None, scopes, measured())
    export_run(run(num_prompts=3), path, [block])
    return path


def measured() -> Matrix:
    """Sums of 3 prompts at 2 scopes; the first prompt has no value at the first scope."""
    values = np.random.default_rng(0).normal(size=(3, 2, 4))
    values[..., 0] = 16
    values[..., 2] = np.square(values[..., 2])
    values[0, 0] = (0, 0, 0, np.nan)
    return values


def test_sums_come_back_bit_for_bit(file: Path, run: Callable[..., RunResult]) -> None:
    """Catches rounding, byte order, and NaN (no finite value) that becomes something else."""
    (block,) = import_sums(file)
    assert (block.candidate, block.metric, block.scopes) == (
        "int8", "rel_error", ("layers.0", "layers.1"),
    )  # fmt: skip
    assert np.array_equal(block.values, measured(), equal_nan=True)
    assert import_run(file).run_id == run().run_id


IMPOSSIBLE = [
    ("NaN sum", (0, 1, 1), np.nan, "not finite"),
    ("infinite sum", (2, 0, 1), -np.inf, "not finite"),
    ("NaN sum of squares", (1, 1, 2), np.nan, "not finite"),
    ("infinite number of values", (1, 0, 0), np.inf, "not finite"),
    ("negative number of values", (1, 0, 0), -1.0, "negative or not whole"),
    ("half a value", (1, 0, 0), 0.5, "negative or not whole"),
    ("negative sum of squares", (1, 1, 2), -1e-9, "squares is negative"),
]


@pytest.mark.parametrize(
    ("place", "value", "words"), [i[1:] for i in IMPOSSIBLE], ids=[i[0] for i in IMPOSSIBLE]
)
def test_sums_that_no_run_measures_are_refused(
    place: tuple[int, ...], value: float, words: str
) -> None:
    """Catches NaN in a baseline, against which everything is clear."""
    values = measured()
    values[place] = value
    scopes = (Scope("layers.0"), Scope("layers.1"))
    rows = encode_sums([Block("int8", "per_prompt", "rel_error", None, scopes, values)])
    with pytest.raises(UserError, match=f"b.json: prompt_sums of rel_error.*{words}"):
        decode_sums(rows, "b.json", 3)


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
"""Whatever the run says of its prompts."""


@pytest.mark.parametrize(("change", "words"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_damaged_sums_are_one_clear_line(file: Path, change: Any, words: str) -> None:
    """Catches a traceback, or memory filled by a file that lies about its size."""
    document = json.loads(file.read_text())
    document["prompt_sums"] = rows = change(document["prompt_sums"])
    document["run"]["num_prompts"] = rows[0]["num_prompts"] if rows else 3
    file.write_text(json.dumps(document))
    with pytest.raises(UserError, match=words):
        import_sums(file)


def test_sums_of_another_number_of_prompts_are_refused(file: Path) -> None:
    """Catches a crash after everything was measured: refused when the file is read."""
    document = json.loads(file.read_text())
    document["run"]["num_prompts"] = 4
    file.write_text(json.dumps(document))
    with pytest.raises(UserError, match="candidate int8: 3 prompts; its run has 4"):
        import_sums(file)
