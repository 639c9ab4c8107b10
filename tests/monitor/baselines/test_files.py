"""Runs as files: read back, a run is the same run."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.baselines.comparable import mismatches
from quantwatch.baselines.files import dumps, encode, export_run, import_run, loads
from quantwatch.domain import (
    CandidateResult,
    Measurement,
    RunResult,
    RunStatus,
    Scope,
    Verdict,
)
from quantwatch.errors import UserError

Run = Callable[..., RunResult]


def same(a: Any, b: Any) -> bool:
    """Equality of records in which NaN equals NaN, to the last bit of every float."""
    return json.dumps(encode(a)) == json.dumps(encode(b)) and type(a) is type(b)


def test_a_run_reads_back_as_itself(run: Run, tmp_path: Path) -> None:
    """Catches a field that is lost, and NaN or tuples that come back as something else."""
    path = tmp_path / "baseline.json"
    export_run(run(), path)
    back = import_run(path)
    assert same(back, run())
    assert replace(back, noise_floor={}) == replace(run(), noise_floor={})
    assert back.noise_floor.keys() == run().noise_floor.keys()
    assert math.isnan(back.noise_floor["lens_kl", "layers.0"])
    assert mismatches(back, run()) == ()


def test_the_file_is_strict_json_for_git(run: Run, tmp_path: Path) -> None:
    """Catches bare NaN, which other readers refuse, and leftovers of a half-written file."""
    path = tmp_path / "baseline.json"
    export_run(run(), path)
    text = path.read_text("utf-8")
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"bare {constant}"))
    assert "ünïcode" in text
    assert [file.name for file in tmp_path.iterdir()] == ["baseline.json"]


number = st.none() | st.floats(allow_nan=True, allow_infinity=True, width=64)
count = st.integers(0, 2**40)
rows = st.builds(
    Measurement,
    metric=st.sampled_from(["logit_kl", "sqnr_db"]),
    scope=st.text(min_size=1, max_size=9).map(Scope),
    n=count, n_nan=count, n_posinf=count, n_neginf=count, n_missing=count,
    mean=number, std=number, se=number, min=number, p50=number, p90=number, p95=number,
    p99=number, p999=number, max=number,
    max_prompt=st.none() | count, max_position=st.none() | count, method=st.text(max_size=9),
)  # fmt: skip
leaf = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(max_size=5)
tables = st.dictionaries(
    st.text(max_size=5), st.recursive(leaf, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
)
floors = st.dictionaries(st.tuples(st.text(max_size=5), st.text(max_size=5)), st.floats())


@pytest.mark.slow
@given(st.lists(rows, max_size=3), tables, floors)
def test_any_run_survives_the_round_trip(
    measured: list[Measurement], table: dict[str, Any], floor: dict[tuple[str, str], float]
) -> None:
    """Catches numbers that change on the way: -0.0, NaN, 1e-308, 2**53."""
    result = _changed(measured, table, floor)
    assert same(loads(dumps(result), "text"), result)


def _changed(
    measured: list[Measurement], table: dict[str, Any], floor: dict[tuple[str, str], float]
) -> RunResult:
    return RunResult(
        run_id="01", check="n", status=RunStatus.SUCCEEDED, verdict=Verdict.PASS,
        started_at=datetime(2026, 1, 1, tzinfo=UTC), finished_at=None, suite_name="s",
        suite_hash="h", num_tokens=1, num_prompts=1, reference=None, capture_sha="c",
        metrics_version=1, environment=table, config={},
        candidates=(CandidateResult("a", None, Verdict.PASS, tuple(measured)),),
        noise_floor=floor,
    )  # fmt: skip


def edited(run: RunResult, change: Callable[[dict[str, Any]], Any]) -> str:
    document = {"format": "quantwatch-run", "version": 1, "run": encode(run)}
    change(document)
    return json.dumps(document)


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another file": (lambda d: d.pop("format"), "not an exported run; make one with"),
    "newer version": (lambda d: d.update(version=2), "version 2 of the file; this program reads 1"),
    "no run": (lambda d: d.pop("run"), "errors\n  run_id: required, but missing"),
    "missing field": (lambda d: d["run"].pop("suite_hash"), "suite_hash: required, but missing"),
    "text for a number": (
        lambda d: d["run"]["candidates"][0]["measurements"][0].update(mean="0.1"),
        'candidates[0].measurements[0].mean: "0.1" is not allowed; allowed: a number',
    ),
    "unknown verdict": (
        lambda d: d["run"].update(verdict="fine"),
        'verdict: "fine" is not allowed',
    ),
    "unknown field": (
        lambda d: d["run"]["candidates"][0].update(mood="good"),
        "run.candidates[0].mood is unknown here; a newer quantwatch wrote the file",
    ),
    "noise floor": (
        lambda d: d["run"].update(noise_floor={}),
        "noise_floor: allowed: a list in brackets",
    ),
}


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_such_run_is_refused_in_one_line(
    run: Run, tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    """Catches a baseline that silently lacks half of its numbers."""
    path = tmp_path / "b.json"
    path.write_text(edited(run(), change), "utf-8")
    with pytest.raises(UserError) as caught:
        import_run(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


CONTENT = {
    "empty": (b"", "not JSON, or cut off: Expecting value in line 1"),
    "not JSON": (b"run: 1", "not JSON, or cut off"),
    "bare NaN": (b'{"format": NaN}', "NaN is not JSON"),
    "not UTF-8": (b"\xff\xfe", "it is not UTF-8 text"),
    "a list": (b"[]", "not an exported run"),
    "nested too deeply": (b"[" * 100_000, "not an exported run: nested too deeply"),
}


@pytest.mark.parametrize(("content", "words"), CONTENT.values(), ids=CONTENT)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """Catches a traceback for a wrong file."""
    path = tmp_path / "b.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        import_run(path)


def test_a_file_that_was_cut_off_is_refused_wherever(run: Run, tmp_path: Path) -> None:
    """Catches half a baseline that looks like a whole one."""
    path = tmp_path / "b.json"
    export_run(run(), path)
    content = path.read_bytes().rstrip()
    for size in range(0, len(content), 97):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=r"cut off|not UTF-8"):
            import_run(path)


def test_only_a_succeeded_run_can_be_exported(run: Run, tmp_path: Path) -> None:
    """Catches a baseline without numbers."""
    with pytest.raises(UserError, match="run 01JQ is failed: only a succeeded run"):
        export_run(run(status=RunStatus.FAILED), tmp_path / "b.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["gone/b.json", "."])
def test_a_place_that_can_not_be_written_or_read_is_named(
    run: Run, tmp_path: Path, name: str
) -> None:
    """Catches a traceback for a misspelt folder."""
    with pytest.raises(UserError, match="cannot be written"):
        export_run(run(), tmp_path / name)
    with pytest.raises(UserError, match="cannot be read"):
        import_run(tmp_path / name)
