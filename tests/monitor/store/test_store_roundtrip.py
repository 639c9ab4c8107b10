"""What `finish_run` is given comes back from `get_result`, field by field, on both databases."""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantwatch.domain import (
    Alert,
    CandidateResult,
    Culprit,
    Fingerprint,
    Measurement,
    NonFinite,
    RunResult,
    RunStatus,
    Scope,
    Severity,
    Variant,
    Verdict,
)
from quantwatch.store.runs import begin_run, finish_run, get_result
from quantwatch.store.session import Database
from quantwatch.telemetry import new_run_id

names = st.text("abcdefgh.-_0123456789", min_size=1, max_size=12)
# NUL and lone surrogates have a test of their own; here every text must come back unchanged.
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)
numbers = st.none() | st.floats(allow_nan=False)
counts = st.integers(0, 2**62)
scopes = st.sampled_from(["model", "embedding", "layers.0", "layers.12.mlp", "head"]).map(Scope)
metrics = st.sampled_from(["logit_kl", "lens_kl", "sqnr_db", "rel_error"])
leaves: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | words
leaves = leaves | st.floats(allow_nan=False) | st.just("\0 \ud800 $float")
keys = st.text(max_size=6) | st.sampled_from(["$float", "$$float"])
json_values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
)
json_objects = st.dictionaries(keys, json_values, max_size=3)
instants = st.datetimes(
    datetime(1990, 1, 1),
    datetime(2200, 1, 1),
    timezones=st.sampled_from([UTC, timezone(timedelta(hours=-8)), timezone(timedelta(hours=5.5))]),
)
digest = st.text("0123456789abcdef", max_size=8)
fingerprints = st.builds(Fingerprint, *[digest] * 6)
variants = st.builds(
    Variant,
    name=names,
    fingerprint=fingerprints,
    execution=st.sampled_from(["float32", "dequantized"]),
    size_bytes=counts,
    bits_per_weight=finite,
    source=json_objects,
    notes=st.lists(words, max_size=2).map(tuple),
    skipped=st.lists(st.tuples(names, words), max_size=2).map(tuple),
)
measurements = st.builds(
    Measurement,
    metric=metrics,
    scope=scopes,
    **dict.fromkeys(("n", "n_nan", "n_posinf", "n_neginf", "n_missing"), counts),
    **dict.fromkeys(
        ("mean", "std", "se", "min", "p50", "p90", "p95", "p99", "p999", "max"), numbers
    ),
    max_prompt=st.none() | counts,
    max_position=st.none() | counts,
    method=st.sampled_from(["all positions", "sampled prompts"]),
)
candidates = st.builds(
    CandidateResult,
    name=names,
    variant=st.none() | variants,
    verdict=st.none() | st.sampled_from(Verdict),
    measurements=st.lists(measurements, max_size=4, unique_by=lambda m: (m.metric, m.scope)).map(
        tuple
    ),
    culprit=st.none()
    | st.builds(
        Culprit,
        scope=st.none() | scopes,
        value=numbers,
        first_difference=st.none() | scopes,
        words=words,
        head_rows=st.lists(counts, max_size=3).map(tuple),
    ),
    first_nonfinite=st.none() | st.builds(NonFinite, scopes, counts, counts),
    bit_equal=st.booleans(),
    failure=st.none() | words,
    baseline_differences=st.lists(json_objects, max_size=2).map(tuple),
)
alert_values = st.tuples(finite, st.just("finite")) | st.tuples(
    st.none(), st.sampled_from(["nan", "posinf", "neginf", "missing"])
)
alerts = st.builds(
    lambda value, **fields: Alert(value=value[0], value_kind=value[1], **fields),
    alert_values,
    rule=names,
    candidate=names,
    metric=metrics,
    statistic=st.sampled_from(["mean", "p99"]),
    scope=scopes,
    threshold=finite,
    severity=st.sampled_from(Severity),
    words=words,
)
ends = st.tuples(st.just(RunStatus.SUCCEEDED), st.sampled_from(Verdict)) | st.tuples(
    st.sampled_from([RunStatus.FAILED, RunStatus.CANCELLED]), st.none()
)


@st.composite
def results(draw: st.DrawFn) -> RunResult:
    status, verdict = draw(ends)
    return RunResult(
        run_id=new_run_id(),
        check=draw(names),
        status=status,
        verdict=verdict,
        started_at=draw(instants),
        finished_at=draw(st.none() | instants),
        suite_name=draw(names),
        suite_hash=draw(digest),
        num_tokens=draw(counts),
        num_prompts=draw(counts),
        reference=draw(st.none() | variants),
        capture_sha=draw(digest),
        metrics_version=draw(counts),
        environment=draw(json_objects),
        config=draw(json_objects),
        candidates=tuple(draw(st.lists(candidates, max_size=3, unique_by=lambda c: c.name))),
        alerts=tuple(draw(st.lists(alerts, max_size=3))),
        noise_floor=draw(
            st.dictionaries(st.tuples(metrics, scopes), st.floats(allow_nan=False), max_size=4)
        ),
        timings_s=draw(st.dictionaries(names, finite, max_size=2)),
        baseline_run_id=draw(st.none() | names),
        baseline_mismatch=tuple(draw(st.lists(words, max_size=2))),
        capture=draw(json_objects),
        reason=draw(st.none() | words),
    )


def _through(db: Database, result: RunResult) -> RunResult:
    begin_run(db, run_id=result.run_id, check=result.check, config={}, started_at=result.started_at)
    finish_run(db, result, None, ())
    return get_result(db, result.run_id)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(result=results())
def test_any_result_comes_back_equal(db: Database, result: RunResult) -> None:
    """Catches a lost field, a changed order, +Inf or a time zone that did not survive."""
    assert _through(db, result) == result


def test_nan_comes_back_as_nan(db: Database, make_result: Callable[..., RunResult]) -> None:
    """Catches SQLite's NaN → NULL, and NaN in JSON that PostgreSQL refuses (B13, B14)."""
    plain = make_result()
    row = replace(plain.candidates[0].measurements[0], mean=math.nan, max=math.inf, se=None)
    result = make_result(
        candidates=(replace(plain.candidates[0], measurements=(row,)),),
        alerts=(),
        noise_floor={("logit_kl", "model"): math.nan, ("lens_kl", "head"): math.inf},
        capture={"observer_effect": {"int8": math.nan, "int4": -math.inf}},
    )
    back = _through(db, result)
    again = back.candidates[0].measurements[0]
    assert again.mean is not None
    assert math.isnan(again.mean)
    assert replace(again, mean=None) == replace(row, mean=None)
    assert math.isnan(back.noise_floor["logit_kl", "model"])
    assert back.noise_floor["lens_kl", "head"] == math.inf
    effect = back.capture["observer_effect"]
    assert math.isnan(effect["int8"])
    assert effect["int4"] == -math.inf


def test_equal_models_keep_an_infinite_sqnr(
    db: Database, make_result: Callable[..., RunResult]
) -> None:
    """Catches +Inf becoming NULL or 1.8e308: sqnr_db is +Inf where models are bit-equal."""
    plain = make_result()
    row = replace(plain.candidates[0].measurements[0], metric="sqnr_db", n_posinf=8, mean=math.inf)
    candidate = replace(plain.candidates[0], measurements=(row,), bit_equal=True)
    result = make_result(candidates=(candidate,), alerts=())
    assert _through(db, result) == result


def test_numpy_numbers_become_plain_ones(
    db: Database, make_result: Callable[..., RunResult]
) -> None:
    """Catches numpy integers that SQLite stores as blobs and PostgreSQL refuses."""
    import numpy as np

    plain = make_result()
    row = replace(
        plain.candidates[0].measurements[0],
        n=np.int64(8),  # type: ignore[arg-type]
        mean=np.float64(0.25),
        max_position=np.int32(3),  # type: ignore[arg-type]
    )
    candidate = replace(
        plain.candidates[0],
        measurements=(row,),
        bit_equal=np.bool_(True),  # type: ignore[arg-type]
    )
    capture: dict[str, Any] = {"n": np.int64(3), "x": np.float32(0.5), "ok": np.bool_(False)}
    back = _through(db, make_result(candidates=(candidate,), alerts=(), capture=capture))
    assert back.capture == {"n": 3, "x": 0.5, "ok": False}
    assert type(back.candidates[0].measurements[0].n) is int
    assert back.candidates[0].measurements[0] == row


def test_texts_postgres_refuses_become_visible(
    db: Database, make_result: Callable[..., RunResult]
) -> None:
    """Catches a run that can't be saved because an error text holds NUL or half a character."""
    result = make_result(
        status=RunStatus.FAILED, verdict=None, candidates=(), alerts=(), reason="a\0b \ud83d"
    )
    assert _through(db, result).reason == "a\\x00b \\ud83d"
