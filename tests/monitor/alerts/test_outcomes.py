"""Enter and leave thresholds of every kind of rule, both directions, and what is missing."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.alerts.outcomes import outcomes, relaxed, rule_sha, unmeasured
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import CandidateResult, Measurement, RuleOutcome, Severity

Row = Callable[..., Measurement]


def only(*rows: Measurement) -> CandidateResult:
    return CandidateResult(name="cand", variant=None, verdict=None, measurements=rows)


def judge(
    rule: dict[str, Any], *rows: Measurement, floor: float = 0.0, before: Any = None
) -> RuleOutcome:
    floors = {(row.metric, str(row.scope)): floor for row in rows}
    config = RuleConfig.model_validate({"name": "r", **rule})
    [found] = outcomes(only(*rows), [config], noise_floor=floors, baseline=before)
    return found


ABSOLUTE = [
    # metric, threshold, value, outcome
    ("logit_kl", 0.1, 0.11, "breach"),
    ("logit_kl", 0.1, 0.1, "between"),
    ("logit_kl", 0.1, 0.0801, "between"),
    ("logit_kl", 0.1, 0.0799, "clear"),
    ("top1_agreement", 0.9, 0.89, "breach"),
    ("top1_agreement", 0.9, 0.91, "between"),
    ("top1_agreement", 0.9, 0.921, "clear"),
    ("sqnr_db", 20.0, 19.0, "breach"),
    ("sqnr_db", 20.0, 24.9, "between"),
    ("sqnr_db", 20.0, 25.1, "clear"),
    ("sqnr_db", -20.0, -16.0, "between"),
    ("sqnr_db", -20.0, -14.0, "clear"),
]


@pytest.mark.parametrize(("metric", "threshold", "value", "outcome"), ABSOLUTE)
def test_an_absolute_rule_is_left_nearer_to_the_best_value(
    measurement: Row, metric: str, threshold: float, value: float, outcome: str
) -> None:
    """Catches a leave threshold on the wrong side where higher is better, or best is infinite."""
    scope = "layers.0" if metric == "sqnr_db" else "model"
    rule = {"metric": metric, "threshold": threshold, "scope": scope}
    found = judge(rule, measurement(metric, scope, value))
    assert (found.outcome, found.value, found.scope) == (outcome, value, scope)


BASELINE = [
    # value now (baseline 0.004, effect 0.001), floor, outcome
    (0.0051, 0.0, "breach"),
    (0.0049, 0.0, "between"),
    (0.0047, 0.0, "clear"),
    (0.004, 0.0, "clear"),
    (0.0069, 0.001, "between"),
    (0.0063, 0.001, "clear"),
]


@pytest.mark.parametrize(("value", "floor", "outcome"), BASELINE)
def test_a_baseline_rule_is_left_nearer_to_the_baseline(
    measurement: Row, value: float, floor: float, outcome: str
) -> None:
    """Catches a rule that a value equal to the baseline never leaves."""
    rule = {"metric": "logit_kl", "kind": "baseline", "min_effect": 0.001}
    old = only(measurement("logit_kl", "model", 0.004))
    assert (
        judge(rule, measurement("logit_kl", "model", value), floor=floor, before=old).outcome
        == outcome
    )


def test_a_baseline_rule_without_a_baseline_is_missing_not_clear(measurement: Row) -> None:
    """Catches an alert that recovers because nobody compares any more."""
    rule = {"metric": "logit_kl", "kind": "baseline", "min_effect": 0.001}
    for before in (None, only()):
        found = judge(rule, measurement("logit_kl", "model", 9.0), before=before)
        assert (found.outcome, found.value_kind) == ("missing", "missing")


@pytest.mark.parametrize(
    ("worst", "floor", "outcome"),
    [(3.1, 0.0, "breach"), (2.9, 0.0, "between"), (2.3, 0.0, "clear"), (2.9, 1.0, "between"), (2.3, 1.0, "clear")],
)  # fmt: skip
def test_a_ratio_rule_is_left_at_a_smaller_ratio(
    measurement: Row, worst: float, floor: float, outcome: str
) -> None:
    """Catches a leave threshold that moves with the median but not with the noise floor."""
    rule = {"metric": "isolated_error", "scope": "layers.*", "kind": "median_ratio", "factor": 3}
    rows = [measurement("isolated_error", f"layers.{n}", 1.0) for n in range(5)]
    rows.append(measurement("isolated_error", "layers.5", worst))
    found = judge(rule, *rows, floor=floor)
    assert (found.outcome, found.scope) == (outcome, "layers.5")


def test_without_a_measured_layer_there_is_no_median(measurement: Row) -> None:
    """Catches a limit of 0, the median of nothing, which any rounding breaches."""
    rule = {"metric": "isolated_error", "kind": "median_ratio", "factor": 3, "scope": "*"}
    rows = [measurement("isolated_error", scope, 1e-7) for scope in ("embedding", "head")]
    assert judge(rule, *rows).outcome != "breach"
    layers = [measurement("isolated_error", f"layers.{n}", 1e-9) for n in range(3)]
    assert judge(rule, *rows, *layers).outcome == "breach"


def test_nan_is_a_breach_and_names_its_kind(measurement: Row) -> None:
    """Catches a broken model that recovers: NaN is above no limit (B16)."""
    row = measurement("logit_kl", "model", 0.0, n_nan=3)
    found = judge({"metric": "logit_kl", "threshold": 0.1}, row)
    assert (found.outcome, found.value, found.value_kind) == ("breach", None, "nan")


def test_a_series_that_vanished_is_missing(measurement: Row) -> None:
    """Catches a renamed layer that resolves its own alert."""
    rule = {"metric": "lens_kl", "scope": "layers.7", "threshold": 0.1}
    assert judge(rule, measurement("lens_kl", "layers.0", 0.0)).outcome == "missing"


def test_the_worst_scope_speaks(measurement: Row) -> None:
    """Catches an alert whose value is the first layer's."""
    rule = {"metric": "lens_kl", "scope": "layers.*", "threshold": 0.1}
    rows = [measurement("lens_kl", f"layers.{n}", value) for n, value in enumerate((0.2, 0.5, 0.3))]
    found = judge(rule, *rows)
    assert (found.scope, found.value, found.threshold) == ("layers.1", 0.5, 0.1)
    broken = measurement("lens_kl", "layers.3", None, n_nan=8)
    assert judge(rule, *rows, broken).scope == "layers.3"


def test_a_rule_that_is_off_says_nothing(measurement: Row) -> None:
    """Catches an alert of a rule that was switched off."""
    config = RuleConfig(name="r", metric="logit_kl", threshold=0.1, enabled=False)
    assert outcomes(only(measurement("logit_kl", "model", 1.0)), [config], noise_floor={}) == ()


SHA = RuleConfig(name="r", metric="logit_kl", threshold=0.1)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"threshold": 0.2}, False), ({"leave_factor": 0.5}, False), ({"enter_runs": 2}, False),
        ({"m_of_n": (2, 5)}, False), ({"scope": "model"}, True), ({"severity": Severity.WARNING}, True),
    ],
    ids=["threshold", "leave", "runs", "m of n", "a default, written", "severity"],
)  # fmt: skip
def test_the_digest_of_a_rule(changes: dict[str, Any], same: bool) -> None:
    """Catches an edit that keeps the old episode, and one of severity that can't escalate."""
    assert (rule_sha(SHA.model_copy(update=changes)) == rule_sha(SHA)) is same


@pytest.mark.parametrize(
    ("written", "counts"),
    [
        ({}, (1, None)), ({"enter_runs": 3}, (3, None)), ({"m_of_n": (2, 5)}, (2, 5)),
        ({"m_of_n": (1, 1)}, (1, None)), ({"m_of_n": (1, 9)}, (1, None)),
    ],
    ids=["default", "in a row", "two of five", "one of one", "one of nine"],
)  # fmt: skip
def test_how_a_rule_counts(
    written: dict[str, Any], counts: tuple[int, int | None], measurement: Row
) -> None:
    """Catches a rule whose way to count never reaches the state machine."""
    rule = {"metric": "logit_kl", "threshold": 0.1, **written}
    found = judge(rule, measurement("logit_kl", "model", 1.0))
    assert (found.enter_runs, found.enter_window) == counts


limits = st.floats(1e-6, 1e3)


@given(limits, st.floats(0.05, 1), st.floats(0, 2e3))
def test_leaving_is_never_easier_than_entering(limit: float, factor: float, value: float) -> None:
    """Catches a value that is clear of a rule that it breaches."""
    for metric, best in (("logit_kl", 0.0), ("sqnr_db", float("inf"))):
        rule = RuleConfig(
            name="r", metric=metric, threshold=limit, leave_factor=factor,
            scope="model" if metric == "logit_kl" else "layers.0",
        )  # fmt: skip
        softer = relaxed(rule)
        assert rule.threshold is not None
        assert softer.threshold is not None
        if best == 0.0:
            assert softer.threshold <= rule.threshold
            assert not (value <= softer.threshold and value > rule.threshold)
        else:
            assert softer.threshold >= rule.threshold


def test_what_is_not_clear_neither_breaches_nor_recovers(measurement: Row) -> None:
    """Catches an interval that is too wide to tell, and that resolves a regression."""
    rule = {"metric": "logit_kl", "threshold": 0.1, "non_finite": "inconclusive"}
    found = judge(rule, measurement("logit_kl", "model", 0.0, n_nan=1))
    assert (found.outcome, found.value, found.value_kind) == ("undecided", None, "inconclusive")


def test_a_rule_that_ignores_nan_is_not_clear_when_nothing_else_is_left(measurement: Row) -> None:
    """Catches a model that is NaN throughout and closes the alert on its own regression."""
    rule = {"metric": "logit_kl", "threshold": 0.1, "non_finite": "ignore"}
    found = judge(rule, measurement("logit_kl", "model", None, n_nan=1000))
    assert (found.outcome, found.value, found.value_kind) == ("undecided", None, "inconclusive")
    assert judge(rule, measurement("logit_kl", "model", 0.0, n_nan=1)).outcome == "clear"


def test_a_baseline_without_the_series_is_missing_not_clear(measurement: Row) -> None:
    """Catches an alert that recovers because the new baseline never measured its metric."""
    rule = {"metric": "logit_kl", "kind": "baseline", "min_effect": 0.001}
    now = measurement("logit_kl", "model", 9.0)
    other = only(measurement("top1_agreement", "model", 1.0))
    broken = only(measurement("logit_kl", "model", None, n_nan=8))
    assert [judge(rule, now, before=before).outcome for before in (other, broken)] == [
        "missing",
        "missing",
    ]


def test_a_candidate_without_a_measurement_is_missing_in_every_rule() -> None:
    """Catches rules of a candidate that failed to load, and of which nobody hears again."""
    off = SHA.model_copy(update={"name": "off", "enabled": False})
    [found] = unmeasured(only(), [SHA, off], "could not be measured: gone")
    assert (found.rule, found.outcome, found.words) == (
        "r",
        "missing",
        "could not be measured: gone",
    )
    assert found.rule_sha == rule_sha(SHA)


def test_a_drift_is_a_warning_whatever_the_rule_says() -> None:
    """Catches a page because a driver was updated."""
    changed = ({"name": "environment.gpus.0.driver", "value": "2", "baseline": "1"},)
    candidate = CandidateResult("cand", None, None, baseline_differences=changed)
    config = RuleConfig(name="r", metric="drift", scope="environment.*")
    [found] = outcomes(candidate, [config], noise_floor={})
    assert (found.outcome, found.severity, found.value) == ("breach", Severity.WARNING, 1.0)
