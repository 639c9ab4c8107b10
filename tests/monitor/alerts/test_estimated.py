"""Rules on estimates: only what the exact sample supports is a breach."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from quantwatch.alerts.outcomes import outcomes
from quantwatch.alerts.overrides import rules_for
from quantwatch.config.rules import RuleConfig
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import CandidateResult, Measurement

Row = Callable[..., Measurement]
LAYER = "layers.3"
RULE: dict[str, Any] = {
    "name": "r", "metric": "lens_kl_estimated", "scope": "layers.*", "threshold": 0.15,
}  # fmt: skip

SAMPLES = {
    # what the sample says of estimate − exact: mean, standard error → outcome of a mean of 0.2
    "as good as exact": (0.0, 1e-4, "breach"),
    "wide, but all beyond": (0.0, 0.016, "breach"),
    "too wide": (0.0, 0.017, "undecided"),
    "explained by the estimate's bias": (0.06, 1e-3, "undecided"),
    "too low, so all the more": (-0.1, 0.01, "breach"),
    "one prompt": (0.0, None, "undecided"),
    "none": (None, None, "undecided"),
    "no sample at all": (..., None, "undecided"),
}


@pytest.mark.parametrize(("mean", "se", "expected"), SAMPLES.values(), ids=SAMPLES)
def test_an_estimate_fires_only_with_the_sample(
    measurement: Row, mean: Any, se: float | None, expected: str
) -> None:
    rows = [measurement("lens_kl_estimated", LAYER, 0.2)]
    if mean is not ...:
        rows.append(replace(measurement("lens_kl_difference", LAYER, 0.0), mean=mean, se=se))
    candidate = CandidateResult("c", None, None, tuple(rows))
    [found] = outcomes(candidate, [RuleConfig(**RULE)], noise_floor={})
    assert found.outcome == expected
    if expected == "undecided":
        assert "exact sample" in found.words
        assert (found.value, found.value_kind) == (None, "inconclusive")


def test_the_words_name_both_numbers(measurement: Row) -> None:
    difference = replace(measurement("lens_kl_difference", LAYER, 0.06), se=0.001)
    rows = measurement("lens_kl_estimated", LAYER, 0.2), difference
    [found] = outcomes(CandidateResult("c", None, None, rows), [RuleConfig(**RULE)], noise_floor={})
    assert found.words == (
        "Per-layer KL, estimated 0.2 at layers.3 is above the limit 0.15; the exact sample doesn't "
        "support it: there the estimate is 0.06 more, ± 0.003 (3 standard errors)"
    )


def test_measured_metrics_need_no_support(measurement: Row) -> None:
    rule = RuleConfig(**{**RULE, "metric": "lens_kl"})
    rows = (measurement("lens_kl", LAYER, 0.2),)
    [found] = outcomes(CandidateResult("c", None, None, rows), [rule], noise_floor={})
    assert found.outcome == "breach"


@pytest.mark.parametrize(
    "changes",
    [{"statistic": "p99"}, {"threshold": None, "kind": "median_ratio", "factor": 3},
     {"threshold": None, "kind": "baseline", "min_effect": 0.1}],
    ids=["p99", "median_ratio", "baseline"],
)  # fmt: skip
def test_other_rules_on_estimates_are_refused(changes: dict[str, Any]) -> None:
    """A quantile of estimates is wider than the exact one, and baselines are compared exactly."""
    with pytest.raises(ValidationError, match='takes kind = "absolute" and the statistic mean'):
        RuleConfig(**{**RULE, **changes})


@pytest.mark.parametrize("metric", ["lens_kl_error", "lens_kl_difference"])
def test_errors_of_estimates_are_no_metric_of_rules(metric: str) -> None:
    with pytest.raises(ValidationError, match="has no worse direction"):
        RuleConfig(**{**RULE, "metric": metric})


@pytest.mark.parametrize("lens", ["sampled", "estimated"])
def test_a_rule_on_estimates_holds_where_they_are_made(lens: str) -> None:
    check = CheckConfig.model_validate(
        {"reference": {"model": "m"}, "candidates": [{"name": "c", "model": "m"}],
         "suite": "core-v1", "lens": lens, "rules": [RULE]}
    )  # fmt: skip
    names = {rule.name for rule in rules_for(check, check.candidates[0])}
    assert ("r" in names) == (lens == "estimated")


def test_estimates_without_a_sample_are_refused() -> None:
    with pytest.raises(ValidationError, match="needs lens_positions of 1 or more"):
        CheckConfig.model_validate(
            {"reference": {"model": "m"}, "candidates": [{"name": "c", "model": "m"}],
             "suite": "core-v1", "lens": "estimated", "lens_positions": 0}
        )  # fmt: skip
