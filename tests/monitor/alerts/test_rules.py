"""One rule at a time: kinds, directions, non-finite values, missing measurements."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.alerts.rules import evaluate
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import Alert, CandidateResult, Measurement, Severity

Build = Callable[..., CandidateResult]
Row = Callable[..., Measurement]


def only(*rows: Measurement) -> CandidateResult:
    return CandidateResult(name="cand", variant=None, verdict=None, measurements=rows)


def run(
    rule: dict[str, Any], *rows: Measurement, floor: float = 0.0, before: Any = None
) -> list[Alert]:
    floors = {(row.metric, str(row.scope)): floor for row in rows}
    config = RuleConfig.model_validate({"name": "r", **rule})
    return list(evaluate(only(*rows), [config], noise_floor=floors, baseline=before))


ABSOLUTE = [
    # metric, threshold, value, breaches
    ("logit_kl", 0.1, 0.1, False),
    ("logit_kl", 0.1, math.nextafter(0.1, 1), True),
    ("top1_agreement", 0.9, 0.9, False),
    ("top1_agreement", 0.9, math.nextafter(0.9, 0), True),
    ("leaked_mass", 0.0, 0.0, False),
]


@pytest.mark.parametrize(("metric", "threshold", "value", "breaches"), ABSOLUTE)
def test_an_absolute_rule_is_strict_and_mirrored(
    measurement: Row, metric: str, threshold: float, value: float, breaches: bool
) -> None:
    """Catches `>=`, and a higher-is-better metric judged the wrong way round."""
    alerts = run({"metric": metric, "threshold": threshold}, measurement(metric, "model", value))
    assert bool(alerts) == breaches


@pytest.mark.parametrize("statistic", ["mean", "p50", "p90", "p95", "p99", "p999", "max", "min"])
def test_the_named_statistic_is_read(measurement: Row, statistic: str) -> None:
    """Catches a rule on p99 that looks at the mean."""
    row = replace(measurement("logit_kl", "model", 0.0), **{statistic: 0.5})  # type: ignore[arg-type]
    [alert] = run({"metric": "logit_kl", "threshold": 0.4, "statistic": statistic}, row)
    assert (alert.statistic, alert.value) == (statistic, 0.5)


NONFINITE = [
    # metric, counts of values, breaches
    ("logit_kl", {"n_nan": 1}, "nan"),
    ("logit_kl", {"n_posinf": 1}, "posinf"),
    ("logit_kl", {"n_neginf": 1}, "neginf"),
    ("cosine", {"n_nan": 1}, "nan"),
    ("sqnr_db", {"n_posinf": 1000}, None),
    ("sqnr_db", {"n_posinf": 1}, None),
    ("sqnr_db", {"n_neginf": 1}, "neginf"),
    ("sqnr_db", {"n_nan": 1, "n_neginf": 1}, "nan"),
    ("headroom_bits", {"n_posinf": 2}, None),
]


@pytest.mark.parametrize(("metric", "counts", "kind"), NONFINITE)
@pytest.mark.parametrize("left", [True, False], ids=["some finite", "none finite"])
def test_a_non_finite_value_never_passes_an_infinite_best_value_does(
    measurement: Row, metric: str, counts: dict[str, int], kind: str | None, left: bool
) -> None:
    """Catches NaN hidden behind a good mean, and equal models (SQNR +∞) that don't pass."""
    good = 1e9 if metric in ("sqnr_db", "headroom_bits") else (1.0 if metric == "cosine" else 0.0)
    scope = "model" if metric == "logit_kl" else "layers.0"
    row = measurement(metric, scope, good if left else None, **counts)
    threshold = 0.5 if metric != "logit_kl" else 1e9
    alerts = run({"metric": metric, "threshold": threshold, "scope": scope}, row)
    assert [(alert.value, alert.value_kind) for alert in alerts] == ([(None, kind)] if kind else [])


def test_a_perplexity_ratio_beyond_float64_is_reported_as_infinite(measurement: Row) -> None:
    """Catches an OverflowError, or a bare Infinity in an alert's value."""
    [alert] = run(
        {"metric": "ppl_ratio", "threshold": 1.05}, measurement("nll_difference", "model", 800.0)
    )
    assert (alert.value, alert.value_kind, alert.metric) == (None, "posinf", "ppl_ratio")


def test_rms_delta_p_equals_the_root_mean_square(measurement: Row) -> None:
    """Catches the n − 1 of std leaking into the RMS."""
    values = [0.1, -0.2, 0.3, 0.0]
    mean = sum(values) / 4
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / 3)
    row = measurement("delta_p", "model", mean, std=std, n=4)
    [alert] = run({"metric": "rms_delta_p", "threshold": 0.0}, row)
    assert alert.value == pytest.approx(math.sqrt(sum(v * v for v in values) / 4), rel=1e-12)


@pytest.mark.parametrize(
    ("rows", "kinds"),
    [
        ([], ["missing"]),
        ([("rel_error", "layers.0")], ["missing"]),
        ([("lens_kl", "layers.0")], []),
    ],
    ids=["nothing", "another metric", "measured"],
)
def test_what_was_not_measured_can_not_pass(
    measurement: Row, rows: list[tuple[str, str]], kinds: list[str]
) -> None:
    """Catches a green run in which the rule never saw a number."""
    rule = {"metric": "lens_kl", "scope": "layers.*", "threshold": 0.15}
    alerts = run(rule, *(measurement(metric, scope, 0.0) for metric, scope in rows))
    assert [alert.value_kind for alert in alerts] == kinds


def test_a_missing_measurement_says_where_it_was_looked_for(measurement: Row) -> None:
    """Catches an inconclusive verdict without a reason."""
    row = measurement("lens_kl", "layers.0", None, n=0, n_missing=1000)
    [alert] = run({"metric": "lens_kl", "scope": "layers.0", "threshold": 0.15}, row)
    assert (alert.scope, alert.value) == ("layers.0", None)
    assert alert.words == "Per-layer KL was not measured at layers.0: rule r can't decide"


BASELINE = [
    # metric, min_effect, floor, before and now, breaches
    ("logit_kl", 5e-4, 0.0, (0.002, 0.0024), False),
    ("logit_kl", 5e-4, 0.0, (0.002, 0.004), True),
    ("logit_kl", 5e-4, 1e-3, (0.002, 0.004), False),
    ("logit_kl", 5e-4, 1e-3, (0.002, 0.0051), True),
    ("logit_kl", 5e-4, 0.0, (0.004, 0.002), False),
    ("top1_agreement", 0.01, 0.0, (0.98, 0.975), False),
    ("top1_agreement", 0.01, 0.0, (0.98, 0.96), True),
    ("top1_agreement", 0.01, 0.0, (0.96, 0.98), False),
]


@pytest.mark.parametrize(("metric", "effect", "floor", "values", "breaches"), BASELINE)
def test_a_baseline_rule_wants_more_than_effect_and_noise(
    measurement: Row,
    metric: str,
    effect: float,
    floor: float,
    values: tuple[float, float],
    breaches: bool,
) -> None:
    """Catches a rule that cries over noise, misses a doubled KL, or punishes progress."""
    rule = {"metric": metric, "kind": "baseline", "min_effect": effect}
    before, now = (measurement(metric, "model", value) for value in values)
    assert bool(run(rule, now, floor=floor, before=only(before))) == breaches


def test_a_baseline_rule_says_by_how_much(measurement: Row) -> None:
    """Catches an alert from which nobody learns what changed."""
    rule = {"metric": "logit_kl", "kind": "baseline", "min_effect": 5e-4}
    old = only(measurement("logit_kl", "model", 0.002))
    [alert] = run(rule, measurement("logit_kl", "model", 0.004), before=old)
    expected = "Output KL 0.004 at model is 0.002 above the baseline's 0.002; allowed 0.0005"
    assert (alert.words, alert.threshold) == (expected, 0.0025)


def test_a_baseline_rule_is_silent_without_a_baseline(measurement: Row) -> None:
    """Catches a first run, or one after a failed baseline candidate, that can't pass."""
    rule = {"metric": "logit_kl", "kind": "baseline", "min_effect": 5e-4}
    for before in (None, only()):
        assert run(rule, measurement("logit_kl", "model", 9.0), before=before) == []


def test_recovering_from_nan_is_no_regression_turning_nan_is(measurement: Row) -> None:
    """Catches a comparison with None, and NaN that a missing baseline value excuses."""
    rule = {"metric": "logit_kl", "kind": "baseline", "min_effect": 5e-4}
    finite, broken = (
        measurement("logit_kl", "model", 0.1),
        measurement("logit_kl", "model", None, n_nan=1000),
    )
    assert run(rule, finite, before=only(broken)) == []
    assert [alert.value_kind for alert in run(rule, broken, before=only(finite))] == ["nan"]
    assert [alert.value_kind for alert in run(rule, broken, before=only(broken))] == ["nan"]


def test_a_rule_that_is_switched_off_is_not_evaluated(measurement: Row) -> None:
    """Catches `enabled` being ignored."""
    rule = {"metric": "logit_kl", "threshold": 0.1, "enabled": False}
    assert run(rule, measurement("logit_kl", "model", 1.0)) == []


def test_critical_alerts_come_first_then_the_order_of_rules(measurement: Row) -> None:
    """Catches a report that opens with a warning while a regression hides below."""
    rules = [
        RuleConfig(name="a", metric="logit_kl", threshold=0.1, severity=Severity.WARNING),
        RuleConfig(name="b", metric="tv", threshold=0.1),
        RuleConfig(name="c", metric="js", threshold=0.1),
    ]
    rows = [measurement(metric, "model", 1.0) for metric in ("logit_kl", "js", "tv")]
    found = evaluate(only(*rows), rules, noise_floor={})
    assert [alert.rule for alert in found] == ["b", "c", "a"]


finite = st.floats(0, 1e6, allow_nan=False)


@given(st.lists(finite, min_size=3, max_size=40), st.floats(0.5, 100), finite)
def test_a_median_ratio_rule_agrees_with_its_definition(
    errors: list[float], factor: float, floor: float
) -> None:
    """Catches a threshold that is not max(factor × median, 3 × floor)."""
    from statistics import median

    rows = [
        Measurement(
            "isolated_error", f"layers.{n}", 9, 0, 0, 0, 0, e, None, None, e, e, e, e, e, e, e, 0, 0, "",  # type: ignore[arg-type]
        )
        for n, e in enumerate(errors)
    ]  # fmt: skip
    rule = {
        "metric": "isolated_error", "scope": "layers.*", "kind": "median_ratio", "factor": factor,
    }  # fmt: skip
    alerts = run(rule, *rows, floor=floor)
    threshold = max(factor * median(errors), 3 * floor)
    expected = [f"layers.{n}" for n, error in enumerate(errors) if error > threshold]
    assert [alert.scope for alert in alerts] == expected
    assert all(alert.threshold == threshold for alert in alerts)
