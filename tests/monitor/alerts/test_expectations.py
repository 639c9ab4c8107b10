"""The last table of competitors.md, with the default rules, from measured figures."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from quantwatch.alerts.defaults import DEFAULT_RULES
from quantwatch.alerts.rules import evaluate
from quantwatch.alerts.verdicts import verdict_of
from quantwatch.config.default_rules import merge_rules
from quantwatch.config.rules import RuleOverride
from quantwatch.domain import Alert, CandidateResult, Measurement, NonFinite, Scope, Severity

Build = Callable[..., CandidateResult]
Row = Callable[..., Measurement]


def judge(candidate: CandidateResult, **changes: object) -> tuple[str, list[tuple[str, str]]]:
    alerts = evaluate(candidate, DEFAULT_RULES, noise_floor=changes.get("noise_floor", {}))  # type: ignore[arg-type]
    return str(verdict_of(alerts)), [(alert.rule, str(alert.scope)) for alert in alerts]


def growing(last: float) -> dict[int, float]:
    return {n: last * (n + 1) / 30 for n in range(30)}


def spread(middle: float) -> dict[str, float]:
    """Isolated errors as measured on SmolLM2-135M: the worst layer has 1.6 × the median."""
    return {f"layers.{n}": middle * (0.7 + 0.9 * n / 29) for n in range(30)}


PASSING = {
    "identical": {},
    "bf16": {
        "output": {"logit_kl": 1.6e-4, "top1_agreement": 0.99, "nll_difference": 1e-5},
        "lens": growing(1.6e-4),
        "isolated": spread(0.019) | {"embedding": 0.0017, "head": 0.002, "final_norm": 0.002},
    },
    "int8": {
        "output": {"logit_kl": 0.004, "top1_agreement": 0.977, "nll_difference": 0.003},
        "lens": growing(0.004),
        "isolated": spread(0.019),
    },
    "vocabulary + 64 zero rows": {"output": {"leaked_mass": 2.72e-2}},
}


@pytest.mark.parametrize("figures", PASSING.values(), ids=PASSING)
def test_what_is_right_passes_without_a_word(candidate: Build, figures: dict[str, object]) -> None:
    """Catches false alarms: a threshold that bf16, INT8 or a padded vocabulary would trip."""
    assert judge(candidate(**figures)) == ("pass", [])


@pytest.mark.parametrize("scale_minus_1", [0.05, 0.001, 1e-6], ids=["x1.05", "x1.001", "x1.000001"])
def test_one_faulty_layer_in_equal_models_is_named_alone(
    candidate: Build, scale_minus_1: float
) -> None:
    """Catches a jitter floor that hides a real × 1.001 fault (competitors.md, trap 6)."""
    found = judge(
        candidate(
            output={"logit_kl": 2.62e-4, "top1_agreement": 0.9955, "nll_difference": -8e-6},
            lens=dict.fromkeys(range(17, 30), 2e-4),
            isolated={"layers.17": 0.188 * scale_minus_1},
        )
    )
    assert found == ("regression", [("isolated-error-outlier", "layers.17")])


def test_one_faulty_layer_under_int8_is_named_alone(candidate: Build) -> None:
    """Catches an outlier rule that names innocent layers, or none (the demo's planted fault)."""
    errors = spread(0.019) | {"layers.14": 12.4 * 0.019}
    output = {"logit_kl": 0.0093, "top1_agreement": 0.94, "nll_difference": 0.01}
    found = judge(candidate(output=output, lens=growing(0.0093), isolated=errors))
    assert found == ("regression", [("isolated-error-outlier", "layers.14")])


def test_int4_everywhere_is_a_regression(candidate: Build) -> None:
    """Catches an outlier rule alone deciding: an even loss has no outlier, KL and top-1 see it."""
    output = {"logit_kl": 0.597, "top1_agreement": 0.574, "nll_difference": 0.45}
    verdict, found = judge(candidate(output=output, lens=growing(0.6), isolated=spread(0.24)))
    assert verdict == "regression"
    assert ("layer-kl", "layers.29") in found
    assert {rule for rule, _ in found} == {"layer-kl", "top1-agreement", "perplexity-ratio"}
    assert ("layer-kl", "layers.0") not in found


def test_int4_with_lowered_severities_warns(candidate: Build) -> None:
    """Catches an override that replaces the whole rule, or that leaks to other candidates."""
    names = ("layer-kl", "top1-agreement")
    own = [RuleOverride(name=name, severity=Severity.WARNING) for name in names]
    output = {"logit_kl": 0.597, "top1_agreement": 0.574, "nll_difference": 0.45}
    figures = candidate(output=output, lens=growing(0.6), isolated=spread(0.24))
    alerts = evaluate(figures, merge_rules(DEFAULT_RULES, own), noise_floor={})
    assert verdict_of(alerts) == "warn"
    assert len(alerts) == len(evaluate(figures, DEFAULT_RULES, noise_floor={}))


def test_a_fault_only_in_the_head_is_found_there(candidate: Build) -> None:
    """Catches a tap list without the head (firefly: exit 0), or blame on a layer (trap 1)."""
    output = {"logit_kl": 0.378, "top1_agreement": 0.877, "nll_difference": 0.04}
    verdict, found = judge(candidate(output=output, isolated={"head": 0.02}))
    assert verdict == "regression"
    assert found == [("isolated-error-outlier", "head"), ("top1-agreement", "model")]


def nan_candidate(candidate: Build, measurement: Row) -> CandidateResult:
    """NaN in layer 12's q_proj: everything from there on is NaN."""
    rows = [measurement("lens_kl", f"layers.{n}", None, n_nan=1000) for n in range(12, 30)]
    rows.append(measurement("isolated_error", "layers.12", None, n_nan=1000))
    rows += [
        measurement(metric, "model", None, n_nan=1000)
        for metric in ("logit_kl", "top1_agreement", "nll_difference")
    ]
    first = NonFinite(Scope("layers.12.attention"), 0, 0)
    return candidate(replaced=tuple(rows), first_nonfinite=first)


def test_nan_weights_are_a_regression_that_says_where(candidate: Build, measurement: Row) -> None:
    """Catches `nan > threshold` being False (firefly: a green table of `nan ✓`)."""
    alerts = evaluate(nan_candidate(candidate, measurement), DEFAULT_RULES, noise_floor={})
    assert verdict_of(alerts) == "regression"
    assert (alerts[0].rule, alerts[0].scope, alerts[0].value) == (
        "nonfinite", "layers.12.attention", 1000.0,
    )  # fmt: skip
    assert "first non-finite value at layers.12.attention, prompt 0, position 0" in alerts[0].words
    assert {alert.value_kind for alert in alerts[1:]} == {"nan"}
    assert all(alert.value is None for alert in alerts[1:])


BORN = {
    "a tap with finite outputs": ([("rel_error", "layers.3.mlp")], None, "layers.3.mlp", 1.0),
    "only the output": ([("logit_kl", "model")], None, "model", 1.0),
    "only its place is known": ([], NonFinite(Scope("layers.3.mlp"), 2, 5), "layers.3.mlp", 1.0),
    "equal models": ([("sqnr_db", "layers.3")], None, None, None),
}


@pytest.mark.parametrize(("places", "first", "scope", "value"), BORN.values(), ids=BORN)
def test_a_non_finite_value_anywhere_is_located(
    candidate: Build,
    measurement: Row,
    places: list[tuple[str, str]],
    first: NonFinite | None,
    scope: str | None,
    value: float | None,
) -> None:
    """Catches an overflow inside that the output hides, and SQNR +∞ taken for one."""
    rows = tuple(measurement(metric, where, 1e-9, n_posinf=1) for metric, where in places)
    rule = DEFAULT_RULES[0]
    alerts = evaluate(candidate(replaced=rows, first_nonfinite=first), [rule], noise_floor={})
    found = [(alert.rule, str(alert.scope), alert.value) for alert in alerts]
    assert found == ([("nonfinite", scope, value)] if scope else [])


def test_an_infinite_noise_floor_hides_nothing(candidate: Build, measurement: Row) -> None:
    """Catches max(threshold, NaN or inf): a broken floor would switch the rule off."""
    for floor in (math.nan, math.inf):
        faulty = candidate(isolated={"layers.3": 0.1})
        alerts = evaluate(
            faulty, DEFAULT_RULES, noise_floor={("isolated_error", "layers.3"): floor}
        )
        assert [alert.scope for alert in alerts] == ["layers.3"]


def test_below_three_noise_floors_is_silence(candidate: Build) -> None:
    """Catches a rule that cries over rounding noise when the median is 0."""
    floor = {("isolated_error", "layers.3"): 1e-7}
    for error, verdict in ((2.9e-7, "pass"), (3.1e-7, "regression")):
        found, _ = judge(candidate(isolated={"layers.3": error}), noise_floor=floor)
        assert found == verdict


def test_words_are_a_sentence_with_value_place_and_limit(candidate: Build) -> None:
    """Catches JUnit failures without the number (competitors.md, trap 10)."""
    faulty = candidate(
        output={"top1_agreement": 0.85, "nll_difference": math.log(1.1)},
        lens={3: 0.2},
        isolated={f"layers.{n}": 0.015 for n in range(30)} | {"layers.14": 0.21},
    )
    words = [alert.words for alert in evaluate(faulty, DEFAULT_RULES, noise_floor={})]
    assert words == [
        "Per-layer KL 0.2 at layers.3 is above the limit 0.15",
        "Isolated error 0.21 at layers.14 is 14 × the median of all layers (0.015); limit 3 ×",
        "Top-1 agreement 0.85 at model is below the limit 0.9",
        "Perplexity ratio 1.1 at model is above the limit 1.05",
    ]


def test_severity_decides_the_verdict_not_the_number_of_alerts(candidate: Build) -> None:
    """Catches a share-of-layers verdict ("1 of 30 drifted, fine", competitors.md, trap 8)."""
    [alert] = evaluate(candidate(lens={3: 0.2}), DEFAULT_RULES, noise_floor={})
    many: list[Alert] = [replace(alert, severity=Severity.WARNING)] * 29
    assert verdict_of(many) == "warn"
    assert verdict_of([*many, alert]) == "regression"
