"""The minimum detectable effect of every kind of rule, at its worst scope."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.monitor.alerts.conftest import measurement

from quantwatch.alerts.rules import evaluate
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import Baseline, CandidateResult, Comparison, Detectable, Measurement, Scope
from quantwatch.pipeline.detectable import Family, detectable
from quantwatch.report.detection import detection_words, documents

Z80, T975, T80 = 0.8416212, 1.998341, 0.8473635
"""Normal quantile of 80 %; of Student's t with 63 degrees of freedom 97.5 % and 80 %."""
FAMILY = Family(1, 0.05)
LAYERS = {"layers.0": 0.1, "layers.1": 0.2, "layers.2": 0.3}


def candidate(*rows: Measurement) -> CandidateResult:
    return CandidateResult("c", None, None, rows)


def layers(values: Mapping[str, float], metric: str = "isolated_error") -> CandidateResult:
    return candidate(*(measurement(metric, scope, value) for scope, value in values.items()))


def effect(rule: dict[str, Any], now: CandidateResult, **given: Any) -> Detectable:
    config = RuleConfig.model_validate({"name": "r", **rule})
    floor = given.pop("floor", {})
    before, family = given.pop("before", None), given.pop("family", FAMILY)
    (found,) = detectable(now, [config], floor, before, family)
    assert found.power == 0.8
    return found


def test_an_absolute_rule() -> None:
    """Catches the easiest scope told as the hardest, and a floor that is left out."""
    rule = {"metric": "isolated_error", "scope": "layers.*", "threshold": 0.5}
    found = effect(rule, layers(LAYERS), floor={("isolated_error", "layers.0"): 0.01})
    assert (found.scope, found.num_scopes, found.expected, found.limit) == ("layers.0", 3, 0.1, 0.5)
    assert found.value == pytest.approx(0.4 + Z80 * 0.01, rel=1e-6)


def test_where_less_is_worse() -> None:
    """Catches an agreement that has to rise to be found."""
    rule = {"metric": "top1_agreement", "threshold": 0.9}
    found = effect(rule, candidate(measurement("top1_agreement", "model", 0.97)))
    assert found.value == pytest.approx(0.07)


def test_a_rule_that_breaches_already() -> None:
    """Catches a negative effect."""
    rule = {"metric": "isolated_error", "scope": "layers.2", "threshold": 0.25}
    assert effect(rule, layers(LAYERS)).value == 0.0


def test_an_outlier_rule() -> None:
    """Catches the limit of another layer, and a floor in place of a median that is larger."""
    rule = {"metric": "isolated_error", "scope": "layers.*", "kind": "median_ratio", "factor": 3}
    found = effect(rule, layers(LAYERS))
    assert found.scope == "layers.0"
    # Once it is the largest, the median is the larger one of the other two.
    assert found.limit == pytest.approx(0.9)
    assert found.value == pytest.approx(0.8)
    for share, alerts in ((0.99, 0), (1.01, 1)):
        worse = layers({**LAYERS, "layers.0": 0.1 + share * 0.8})
        config = RuleConfig.model_validate({"name": "r", **rule})
        assert len(evaluate(worse, [config], noise_floor={})) == alerts
    quiet = effect(
        rule, layers(dict.fromkeys(LAYERS, 0.0)), floor={("isolated_error", "layers.1"): 1e-6}
    )
    assert (quiet.scope, quiet.expected) == ("layers.1", 0.0)
    assert quiet.value == pytest.approx((3 + Z80) * 1e-6)


def test_an_outlier_of_two_is_never_one() -> None:
    """Catches a number where no change at all is found: the worse layer is half of the median."""
    rule = {"metric": "isolated_error", "scope": "layers.*", "kind": "median_ratio", "factor": 3}
    found = effect(rule, layers({"layers.0": 0.1, "layers.1": 0.2}))
    assert (found.value, found.reason) == (None, "too few layers: a worse one is the median itself")
    head = effect({**rule, "scope": "head"}, layers({"head": 0.1}))
    assert "no whole layer was measured" in head.reason


@pytest.mark.parametrize(("policy", "value"), [("breach", 0.0), ("inconclusive", None)])
def test_values_that_never_pass(policy: str, value: float | None) -> None:
    """Catches an effect of what breaches, or can't be decided, whatever the rest does."""
    rule = {"metric": "logit_kl", "threshold": 0.5, "non_finite": policy}
    found = effect(rule, candidate(measurement("logit_kl", "model", 0.1, n_nan=1)))
    assert found.value == value


def test_an_estimate_needs_its_sample() -> None:
    """Catches a limit that is passed and decides nothing: see alerts/estimated.py."""
    rule = {"metric": "lens_kl_estimated", "scope": "layers.1", "threshold": 0.15}
    estimate = measurement("lens_kl_estimated", "layers.1", 0.1)
    assert effect(rule, candidate(estimate)).reason == "no exact sample supports it"
    sample = replace(measurement("lens_kl_difference", "layers.1", 0.06), se=0.01)
    found = effect(rule, candidate(estimate, sample))
    assert found.value == pytest.approx(0.15 + 0.06 + 0.03 - 0.1)
    for share, decided in ((0.99, False), (1.01, True)):
        assert found.value is not None
        worse = candidate(
            measurement("lens_kl_estimated", "layers.1", 0.1 + share * found.value), sample
        )
        config = RuleConfig.model_validate({"name": "r", **rule})
        (alert,) = evaluate(worse, [config], noise_floor={})
        assert alert.is_decided is decided


KL = {"metric": "logit_kl", "kind": "baseline", "min_effect": 0.1}
NOW = candidate(measurement("logit_kl", "model", 1.5))


def compared(**changes: Any) -> Baseline:
    made = Comparison("logit_kl", Scope("model"), 64, 1.5, 1.0, 0.4, 0.6, 0.01, 0.01, 1, se=0.02)
    rows = (measurement("logit_kl", "model", 1.0),)
    each = replace(made, **changes)
    return Baseline("c", None, None, rows, comparisons={("logit_kl", "model"): each})


def test_a_paired_rule() -> None:
    """Catches tonight's value for what an unchanged night reads, and a luck that is forgotten."""
    found = effect(KL, NOW, before=compared())
    limit = 0.1 + T975 * 0.02
    assert found.expected == 1.0
    assert found.limit == pytest.approx(1.0 + limit, rel=1e-6)
    assert found.value == pytest.approx(limit + T80 * 0.02, rel=1e-6)
    lucky = effect(KL, NOW, before=compared(handicap=0.05))
    assert lucky.value == pytest.approx(0.05 + (found.value or 0))
    many = effect(KL, NOW, before=compared(se=0.5), family=Family(100, 0.05))
    assert many.value is not None
    assert many.value > effect(KL, NOW, before=compared(se=0.5)).value  # type: ignore[operator]
    floor = {("logit_kl", "model"): 1.0}
    assert effect(KL, NOW, before=compared(), floor=floor).value == pytest.approx(
        3.0 + T975 * 0.02 + T80 * 0.02, rel=1e-6
    )


NEVER: list[tuple[str, dict[str, Any], Any, str]] = [
    ("no baseline", KL, None, "there is no baseline to compare with"),
    ("nine prompts", KL, compared(num_prompts=9, se=0.0), "too few prompts (9): 1 more needed"),
    ("a lost prompt", KL, compared(lost=(3, 4)), "2 prompts have values in only one of the runs"),
    ("no number", KL, compared(baseline=math.nan), "give no limit"),
    ("nothing there", {**KL, "metric": "tv"}, compared(), "nothing was measured where"),
]


@pytest.mark.parametrize(
    ("rule", "before", "said"), [n[1:] for n in NEVER], ids=[n[0] for n in NEVER]
)
def test_what_no_night_finds(rule: dict[str, Any], before: Any, said: str) -> None:
    """Catches an effect of 0, or of any size, where a rule can't decide whatever happens."""
    found = effect(rule, NOW, before=before)
    assert found.value is None
    assert said in found.reason


def test_another_statistic_than_the_mean() -> None:
    """Catches a quantile that is paired by prompt."""
    found = effect({**KL, "statistic": "p99"}, NOW, before=compared())
    assert found.statistic == "p99"
    assert found.value == pytest.approx(0.1)


def test_a_scope_that_can_not_be_found_is_the_worst() -> None:
    """Catches a layer that is not watched behind one that is."""
    rows = {"layers.0": 0.1, "layers.1": 0.2}
    before = Baseline(
        "c", None, None, layers(rows).measurements,
        comparisons={
            ("isolated_error", scope): Comparison("isolated_error", Scope(scope), n, 0.1, 0.1, 0, 0, 1.0)
            for scope, n in (("layers.0", 64), ("layers.1", 4))
        },
    )  # fmt: skip
    rule = {"metric": "isolated_error", "scope": "layers.*", "kind": "baseline", "min_effect": 0.1}
    found = effect(rule, layers(rows), before=before)
    assert (found.scope, found.value, found.num_scopes) == ("layers.1", None, 2)


def test_counted_and_disabled_rules_have_none() -> None:
    """Catches an effect of what is counted, or of a rule that is off."""
    rules = [
        RuleConfig(name="nonfinite", metric="nonfinite", scope="*"),
        RuleConfig(name="off", metric="logit_kl", threshold=1, enabled=False),
    ]
    assert detectable(NOW, rules, {}, None, FAMILY) == ()


def test_reports() -> None:
    """Catches a rule that is left out of the sentence, and NaN in JSON."""
    found = replace(
        NOW,
        detectable=(
            effect(KL, NOW, before=compared(se=0.0)),
            effect(KL, NOW),
            effect(KL, NOW, before=compared(lost=(3, 4))),
            effect(
                {"metric": "isolated_error", "scope": "layers.*", "threshold": 1}, layers(LAYERS)
            ),
        ),
    )
    said = detection_words(found)
    assert said == (
        "Smallest change found in 80% of nights: r a change of 0.1; r a change of 0.9 at layers.0. "
        "Found by no night: r (2 prompts have values in only one of the runs)."
    )
    paired, nothing, *_ = documents(found)
    assert (paired["change"], paired["expected"], paired["reason"]) == (0.1, 1.0, None)
    assert (nothing["change"], nothing["change_kind"], nothing["limit_kind"]) == (
        None, "missing", "missing",
    )  # fmt: skip
    nothing_found = replace(NOW, detectable=(effect(KL, NOW, before=compared(lost=(3,))),))
    assert str(detection_words(nothing_found)).startswith("Found by no night: r (")
    assert detection_words(NOW) is None
