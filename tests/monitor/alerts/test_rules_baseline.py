"""Rules of kind `baseline` on paired tests: decided by the bound, never by the point."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.alerts.changes import Finding, weigh
from quantwatch.alerts.outcomes import outcomes
from quantwatch.alerts.power import more_prompts
from quantwatch.alerts.rules import evaluate
from quantwatch.alerts.verdicts import has_improved, verdict_of
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import Baseline, CandidateResult, Comparison, Measurement, Scope, Verdict
from quantwatch.report.words import alert_value, alert_words

Row = Callable[..., Measurement]
MODEL = Scope("model")
INF, NAN = math.inf, math.nan
KL = RuleConfig(name="kl", metric="logit_kl", kind="baseline", min_effect=0.1)
TOP1 = RuleConfig(name="top1", metric="top1_agreement", kind="baseline", min_effect=0.1)


def compared(low: float, high: float, **changes: Any) -> Comparison:
    """An interval around its middle, over 64 prompts, established on its side of 0."""
    middle = (low + high) / 2
    side = (low > 0) - (high < 0)
    made = Comparison("logit_kl", MODEL, 64, 1 + middle, 1.0, low, high, 0.01, 0.01, side)
    return replace(made, **changes)


FINDINGS = [
    # name, low, high, changes, finding
    ("beyond what is allowed", 0.11, 0.5, {}, Finding.BREACH),
    ("exactly at what is allowed", 0.1, 0.2, {}, Finding.UNCHANGED),
    ("the point is beyond, the bound is not", 0.09, 0.2, {}, Finding.UNCHANGED),
    ("from allowed to far beyond", 0.05, 0.9, {}, Finding.UNPROVEN),
    ("around zero and wide", -0.9, 0.9, {}, Finding.UNPROVEN),
    ("around zero and narrow", -0.09, 0.09, {}, Finding.UNCHANGED),
    ("worse by less than is worth a word", 0.02, 0.09, {}, Finding.UNCHANGED),
    ("beyond, but one of many series", 0.11, 0.2, {"established": 0, "q": 0.4}, Finding.UNPROVEN),
    ("better", -0.5, -0.11, {}, Finding.IMPROVED),
    ("better, but not clearly", -0.5, -0.09, {}, Finding.UNCHANGED),
    ("better, one of many series", -0.2, -0.11, {"established": 0}, Finding.UNCHANGED),
    ("a prompt was lost", -0.01, 0.01, {"lost": (3,)}, Finding.UNCLEAR),
    ("a prompt was lost, and it is worse", 0.2, 0.3, {"lost": (3,)}, Finding.UNCLEAR),
    ("nine prompts, all fine", -0.02, 0.09, {"num_prompts": 9}, Finding.UNCHANGED),
    ("nine prompts, all worse", 0.2, 0.3, {"num_prompts": 9}, Finding.UNCLEAR),
    ("one prompt", 0.2, 0.2, {"num_prompts": 1}, Finding.UNCLEAR),
    ("beyond, but within luck", 0.2, 0.5, {"handicap": 0.1}, Finding.UNCHANGED),
    ("beyond luck as well", 0.21, 0.5, {"handicap": 0.1}, Finding.BREACH),
    ("nothing changed at all", 0.0, 0.0, {"p": 1.0}, Finding.UNCHANGED),
    ("no number at all", NAN, NAN, {"value": NAN, "p": NAN}, Finding.UNCLEAR),
    ("no upper bound", 0.11, NAN, {"value": 1.2}, Finding.UNCLEAR),
    ("no lower bound", NAN, 0.05, {"value": 1.0}, Finding.UNCLEAR),
    ("anything up to infinite", 0.05, INF, {"value": 2.0}, Finding.UNCLEAR),
    ("anything down to infinite", -INF, 0.05, {"value": 1.0}, Finding.UNCLEAR),
    ("from forbidden to infinite", 0.11, INF, {"value": 2.0}, Finding.BREACH),
    ("infinite, as a perplexity is", INF, INF, {"value": INF}, Finding.BREACH),
]


@pytest.mark.parametrize(
    ("low", "high", "changes", "finding"), [f[1:] for f in FINDINGS], ids=[f[0] for f in FINDINGS]
)
def test_the_bound_decides(
    low: float, high: float, changes: dict[str, Any], finding: Finding
) -> None:
    """Catches a verdict by the point, noise called a regression, and a wide interval that passes."""
    assert weigh(KL, compared(low, high, **changes), {}).finding is finding


@given(st.floats(-1, 1), st.floats(0, 1), st.integers(1, 20), st.booleans())
def test_higher_is_better_is_the_mirror_image(
    low: float, width: float, num_prompts: int, established: bool
) -> None:
    """Catches top-1 agreement judged the wrong way round."""
    found = compared(low, low + width, num_prompts=num_prompts)
    found = found if established else replace(found, established=0)
    mirrored = replace(
        found, value=1 - found.difference, low=-found.high, high=-found.low,
        established=-found.established,
    )  # fmt: skip
    assert weigh(KL, found, {}).finding is weigh(TOP1, mirrored, {}).finding


@given(st.floats(-1, 1), st.floats(0, 1))
def test_better_and_worse_are_found_alike(low: float, width: float) -> None:
    """Catches N26: an improvement that needs less, or more, than a regression."""
    found = compared(low, low + width)
    other = compared(-low - width, -low)
    pairs = {Finding.BREACH: Finding.IMPROVED, Finding.IMPROVED: Finding.BREACH}
    one, two = weigh(KL, found, {}).finding, weigh(KL, other, {}).finding
    if one in pairs:
        assert two is pairs[one]


def test_a_change_has_to_be_three_noise_floors() -> None:
    """Catches a floor that is measured and then ignored."""
    found = compared(0.2, 0.3)
    assert weigh(KL, found, {("logit_kl", "model"): 0.06}).finding is Finding.BREACH
    assert weigh(KL, found, {("logit_kl", "model"): 0.1}).finding is Finding.UNCHANGED


def test_the_value_breaches_exactly_where_it_passes_the_threshold() -> None:
    """Catches a stored limit that isn't the one that was used."""
    for low, high in ((0.11, 0.5), (0.09, 0.2), (-0.3, 0.05)):
        found = compared(low, high)
        change = weigh(KL, found, {})
        assert (found.value > change.threshold) == (low > 0.1)
        assert change.threshold == pytest.approx(1 + 0.1 + found.difference - low)


def test_a_limit_is_always_a_number() -> None:
    """Catches inf − inf in the database, where a perplexity is beyond float64."""
    change = weigh(KL, compared(INF, INF, value=INF), {})
    assert change.threshold == pytest.approx(1.1)


# Sentences


def words(low: float, high: float, **changes: Any) -> str:
    return weigh(KL, compared(low, high, **changes), {}).words


def test_sentences_say_what_was_seen() -> None:
    """Catches an alert from which nobody learns how sure it is."""
    expected = (
        " is 0.3 above the baseline's 1 (95 % interval 0.2 … 0.4 over 64 prompts); allowed 0.1"
    )
    assert words(0.2, 0.4) == expected
    assert words(-0.4, -0.2).startswith(" is 0.3 below the baseline's 1 (95 % interval -0.4 … -0.2")


def test_sentences_say_what_is_luck() -> None:
    """Catches a limit above the configured one that nobody can explain."""
    assert words(0.2, 0.4, handicap=0.05).endswith(
        "; allowed 0.15 (0.05 for the best of many runs)"
    )


def test_sentences_say_what_is_missing() -> None:
    """Catches an inconclusive verdict that leaves the reader without a next step."""
    assert words(-0.4, 0.4).endswith("; too wide to tell: about 960 more prompts needed")
    assert words(0.2, 0.3, num_prompts=6).endswith(
        "; too few prompts to tell (6): about 4 more prompts needed"
    )
    assert words(0.2, 0.3, lost=(3,)).endswith(
        "; prompt 3: values in only one of the runs, nothing is concluded"
    )
    assert "prompts 0, 1, 2, 3, 4 and 3 more: values in only" in words(0, 1, lost=tuple(range(8)))
    assert words(0.2, 0.3, established=0, q=0.31).endswith(
        "; not clear among all that is judged (q = 0.31)"
    )


@pytest.mark.parametrize(
    ("half_width", "wanted", "count"), [(0.2, 0.1, 192), (0.4, 0.1, 960), (0.1001, 0.1, 1)]
)
def test_the_number_of_prompts_grows_with_the_square(
    half_width: float, wanted: float, count: int
) -> None:
    """Catches half the width promised for twice the prompts: it takes four times as many."""
    assert more_prompts(half_width, wanted, 64) == count


# Through rules to verdicts


def against(measurement: Row, comparison: Comparison, rule: RuleConfig = KL) -> Any:
    row = measurement(rule.metric, "model", comparison.value)
    before = measurement(rule.metric, "model", comparison.baseline)
    now = CandidateResult("c", None, None, (row,))
    tests = {(rule.metric, "model"): comparison}
    baseline = Baseline("c", None, None, (before,), comparisons=tests)
    alerts = evaluate(now, [rule], noise_floor={}, baseline=baseline)
    improved = has_improved(now, baseline, [rule], noise_floor={})
    told = outcomes(now, [rule], noise_floor={}, baseline=baseline)
    return verdict_of(alerts, improved=improved), alerts, told[0]


VERDICTS = [
    (compared(0.2, 0.4), Verdict.REGRESSION, "breach"),
    (compared(0.09, 0.2), Verdict.PASS, "between"),
    (compared(-0.05, 0.05), Verdict.PASS, "clear"),
    (compared(-0.4, -0.2), Verdict.IMPROVEMENT, "clear"),
    (compared(-0.9, 0.9), Verdict.INCONCLUSIVE, "undecided"),
    (compared(0.0, 0.0, lost=(1,)), Verdict.INCONCLUSIVE, "undecided"),
]


@pytest.mark.parametrize(("comparison", "verdict", "outcome"), VERDICTS)
def test_verdicts_and_outcomes(
    measurement: Row, comparison: Comparison, verdict: Verdict, outcome: str
) -> None:
    """Catches what is not clear closing an alert as missing, or counting as a breach."""
    found, alerts, told = against(measurement, comparison)
    assert (found, told.outcome) == (verdict, outcome)
    assert [alert.is_decided for alert in alerts] == {
        Verdict.REGRESSION: [True], Verdict.INCONCLUSIVE: [False],
    }.get(verdict, [])  # fmt: skip
    assert all(alert.value is None for alert in alerts if not alert.is_decided)


TESTED = [
    ("too wide", compared(-0.9, 0.9), True),
    ("one of many series", compared(0.2, 0.3, established=0, q=0.4), True),
    ("a prompt was lost", compared(-0.9, 0.9, lost=(1,)), False),
    ("nine prompts", compared(0.2, 0.3, num_prompts=9), False),
    ("clear", compared(-0.05, 0.05), False),
    ("a breach", compared(0.2, 0.4), False),
]


@pytest.mark.parametrize(
    ("comparison", "tested"), [row[1:] for row in TESTED], ids=[r[0] for r in TESTED]
)
def test_a_confirmation_that_lost_prompts_is_no_answer(
    measurement: Row, comparison: Comparison, tested: bool
) -> None:
    """Catches a lost prompt taken for a test that denies, and such a test for a lost prompt."""
    _, _, told = against(measurement, comparison)
    assert told.was_tested is tested


def test_a_confirmation_tells_what_was_compared(measurement: Row) -> None:
    """Catches an alert with this run's value alone beside the limit of two pooled runs."""
    pooled = compared(0.2, 0.4)
    row, before = measurement("logit_kl", "model", 1.15), measurement("logit_kl", "model", 1.0)
    baseline = Baseline("c", None, None, (before,), comparisons={("logit_kl", "model"): pooled})
    now = CandidateResult("c", None, None, (row,))
    (alert,) = evaluate(now, [KL], noise_floor={}, baseline=baseline)
    (told,) = outcomes(now, [KL], noise_floor={}, baseline=baseline)
    assert alert.value == told.value == pooled.value > alert.threshold
    assert alert.words.startswith("Output KL 1.3 at model is 0.3 above")


@pytest.mark.parametrize(("rule", "direction"), [(KL, 1), (TOP1, -1)], ids=["up", "down"])
def test_an_outcome_says_which_way_is_worse(
    measurement: Row, rule: RuleConfig, direction: int
) -> None:
    """Catches a peak that goes towards what is better."""
    _, _, told = against(measurement, compared(0.2, 0.4), rule)
    assert told.direction == direction


def test_a_quantile_has_no_paired_test(measurement: Row) -> None:
    """Catches the mean's interval used for p99: it is compared by its own value."""
    rule = RuleConfig(name="r", metric="logit_kl", kind="baseline", min_effect=0.1, statistic="p99")
    verdict, alerts, _ = against(measurement, compared(-0.05, 0.4, lost=(1,)), rule)
    assert (verdict, len(alerts)) == (Verdict.REGRESSION, 1)


# What NaN is to a rule


POLICIES = [
    ("breach", Verdict.REGRESSION, "nan"),
    ("inconclusive", Verdict.INCONCLUSIVE, "inconclusive"),
    ("ignore", Verdict.PASS, None),
]


@pytest.mark.parametrize(("policy", "verdict", "kind"), POLICIES)
@pytest.mark.parametrize("left", [0.01, None], ids=["some finite", "none finite"])
def test_a_rule_says_what_nan_is_to_it(
    measurement: Row, policy: Any, verdict: Verdict, kind: str | None, left: float | None
) -> None:
    """Catches the policy being ignored (X20); the rule nonfinite finds NaN anyway."""
    row = measurement("logit_kl", "model", left, n_nan=3)
    rule = RuleConfig(name="r", metric="logit_kl", threshold=0.1, non_finite=policy)
    alerts = evaluate(CandidateResult("c", None, None, (row,)), [rule], noise_floor={})
    assert verdict_of(alerts) == verdict
    assert [(alert.value, alert.value_kind) for alert in alerts] == ([(None, kind)] if kind else [])


def test_what_is_finite_is_judged_when_nan_is_ignored(measurement: Row) -> None:
    """Catches a rule that is switched off by one NaN."""
    row = measurement("logit_kl", "model", 0.2, n_nan=3)
    rule = RuleConfig(name="r", metric="logit_kl", threshold=0.1, non_finite="ignore")
    (alert,) = evaluate(CandidateResult("c", None, None, (row,)), [rule], noise_floor={})
    assert (alert.value, alert.value_kind) == (0.2, "finite")


def test_what_is_not_clear_can_be_shown(measurement: Row) -> None:
    """Catches a report that knows no sign for a value that was not decided."""
    _, (alert,), _ = against(measurement, compared(-0.9, 0.9))
    assert alert_value(alert).text() == "–"
    assert alert_words(alert, None) == alert.words
    assert "too wide to tell" in alert.words
