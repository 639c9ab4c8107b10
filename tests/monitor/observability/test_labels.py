"""The guard of labels: nothing that grows with use ever becomes a time series."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from quantwatch.domain import RunStatus, Severity, Verdict
from quantwatch.observability import labels, meters
from quantwatch.observability.labels import OTHER, bounded
from quantwatch.telemetry import new_run_id


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    labels.forget()
    yield
    labels.forget()


@pytest.mark.parametrize(
    "value",
    [
        "01JDXYZ2345678901234567890"[:26],
        "https://hooks.example/T0/B0",
        "What is the capital of France?",
        "d2c5f1e09b" * 4,
        "123e4567-e89b-12d3-a456-426614174000",
        "",
        "x" * 65,
        "line\nend",
    ],
    ids=["ulid", "url", "prompt", "digest", "uuid", "empty", "long", "line-end"],
)
def test_what_grows_with_use_is_other(value: str) -> None:
    """Catches a run id, a URL or a prompt as a label."""
    assert bounded("check", value) == OTHER


def test_every_run_id_is_other() -> None:
    """Catches a pattern that lets some ids through."""
    assert {bounded("check", new_run_id()) for _ in range(100)} == {OTHER}


@pytest.mark.parametrize("value", ["nightly", "int4-g64", "smol.v2", "A", "0.1.0"])
def test_names_stay(value: str) -> None:
    """Catches a guard that refuses names that a configuration may have."""
    assert bounded("check", value) == value


@given(st.lists(st.text(max_size=70), max_size=120))
def test_a_label_never_has_more_values_than_its_limit(values: list[str]) -> None:
    """Catches any way around the limit."""
    labels.forget()
    seen = {bounded("operation", value) for value in values}
    assert len(seen - {OTHER}) <= labels.MOST["operation"]


def test_only_names_of_the_configuration_in_use_count() -> None:
    """Catches checks that were removed long ago and stay as series."""
    labels.declare("check", ["nightly"])
    assert bounded("check", "nightly") == "nightly"
    assert bounded("check", "weekly") == OTHER
    labels.declare("check", ["weekly"])
    assert bounded("check", "weekly") == "weekly"


def test_refusals_are_counted() -> None:
    """Catches a guard that hides what it does."""
    before = meters.REFUSED.labels(label="status")._value.get()
    assert bounded("status", "exploded") == OTHER
    assert meters.REFUSED.labels(label="status")._value.get() == before + 1


def test_a_meter_with_an_unbounded_label_cannot_be_made() -> None:
    """Catches a new meter with a label nobody thought about."""
    with pytest.raises(ValueError, match="label 'run_id' is not bounded by anything; bounded are"):
        labels.Counter("quantwatch_x", "x", ["run_id"], registry=CollectorRegistry())


def test_closed_lists_hold_every_word_of_the_domain() -> None:
    """Catches a status or verdict that would be counted as `other`."""
    ended = {status.value for status in RunStatus if status.is_ended}
    assert ended <= labels.CLOSED["status"]
    assert {v.value for v in Verdict} == labels.CLOSED["verdict"]
    assert {s.value for s in Severity} == labels.CLOSED["severity"]


def test_a_meter_counts_under_the_bounded_value() -> None:
    """Catches a meter that goes around the guard."""
    meters.RUNS.labels(check="https://secret/path", status="succeeded").inc()
    text = generate_latest(meters.REGISTRY).decode()
    assert 'quantwatch_runs_total{check="other",status="succeeded"}' in text
    assert "secret" not in text


NAMES = [
    "build_info",
    "scheduler_is_leader",
    "scheduler_last_tick_timestamp_seconds",
    "slots_missed",
    "slots_duplicate_prevented",
    "runs",
    "run_verdicts",
    "run_duration_seconds",
    "last_success_timestamp_seconds",
    "kl_nats",
    "layer_kl_nats",
    "non_finite",
    "alerts",
    "deliveries",
    "delivery_oldest_pending_seconds",
    "db_size_bytes",
    "db_lock_wait_seconds",
    "storage_free_ratio",
    "storage_free_bytes",
    "retry",
    "retry_latency_seconds",
]


def test_the_names_of_the_specification_are_there() -> None:
    """Catches a meter that was renamed: dashboards and rules of users would fall silent."""
    there = {family.name for family in meters.REGISTRY.collect()}
    assert {f"quantwatch_{name}" for name in NAMES} <= there
