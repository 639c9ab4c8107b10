"""Which rules hold for a candidate."""

import tomllib
from typing import Any

import pytest

from quantwatch.alerts.overrides import merge_rules, rules_for
from quantwatch.config.default_rules import DEFAULT_RULES
from quantwatch.config.load import parse
from quantwatch.config.rules import RuleConfig, RuleOverride
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import Severity
from quantwatch.errors import ConfigError

PLAIN: dict[str, Any] = {
    "reference": {"model": "x"},
    "candidates": [{"name": "a", "model": "x"}],
    "suite": "core-v1:demo",
}


def check(**changes: Any) -> CheckConfig:
    return CheckConfig.model_validate(PLAIN | changes)


def by_name(rules: tuple[RuleConfig, ...]) -> dict[str, RuleConfig]:
    return {rule.name: rule for rule in rules}


def test_defaults_hold_without_a_word() -> None:
    """Catches a default that is lost on the way."""
    plain = check()
    of_loaded = tuple(rule for rule in DEFAULT_RULES if rule.metric != "served_kl")
    assert rules_for(plain, plain.candidates[0]) == of_loaded


def test_only_the_given_fields_change_candidate_over_check_over_default() -> None:
    """Catches an override that resets the other fields, or the wrong order of levels."""
    made = check(
        rules=[{"name": "layer-kl", "threshold": 0.3, "severity": "warning"}],
        candidates=[
            {"name": "a", "model": "x", "rules": [{"name": "layer-kl", "threshold": 0.5}]},
            {"name": "b", "model": "x"},
        ],
    )
    mine, other = (by_name(rules_for(made, c))["layer-kl"] for c in made.candidates)
    assert (mine.threshold, mine.severity, mine.scope) == (0.5, Severity.WARNING, "layers.*")
    assert (other.threshold, other.severity, other.metric) == (0.3, Severity.WARNING, "lens_kl")


def test_another_kind_takes_another_number() -> None:
    """Catches the old factor staying beside the new threshold."""
    override = RuleOverride(name="isolated-error-outlier", kind="absolute", threshold=0.5)
    rule = by_name(merge_rules(DEFAULT_RULES, [override]))["isolated-error-outlier"]
    assert (rule.kind, rule.threshold, rule.factor) == ("absolute", 0.5, None)


def test_a_new_rule_is_added() -> None:
    """Catches new rules being taken for misspelt overrides."""
    new = RuleOverride(name="tail", metric="logit_kl", statistic="p999", threshold=1.0)
    assert merge_rules(DEFAULT_RULES, [new])[-1].statistic == "p999"


SWITCHED_OFF = [
    ({"lens_positions": 0}, {"layer-kl"}),
    ({"isolated_fraction": 0.0}, {"isolated-error-outlier", "baseline-isolated-error"}),
    ({"rules": [{"name": "top1-agreement", "enabled": False}]}, {"top1-agreement"}),
]


@pytest.mark.parametrize(("changes", "gone"), SWITCHED_OFF)
def test_what_is_switched_off_is_not_judged(changes: dict[str, Any], gone: set[str]) -> None:
    """Catches an inconclusive verdict because of a metric that nobody asked for."""
    made = check(**changes)
    left = by_name(rules_for(made, made.candidates[0]))
    of_loaded = {rule.name for rule in DEFAULT_RULES} - {"baseline-served-kl"}
    assert of_loaded - left.keys() == gone


def test_output_deviation_is_judged_without_the_lens() -> None:
    """Catches the model-wide top-k deviation being dropped with the lens."""
    rule = {"name": "dev", "metric": "topk_logit_deviation_k5", "threshold": 1.0}
    made = check(lens_positions=0, rules=[rule])
    assert "dev" in by_name(rules_for(made, made.candidates[0]))


REFUSED = [
    (RuleOverride(name="nonfinite", enabled=False), "can't be changed"),
    (RuleOverride(name="nonfinite", severity=Severity.WARNING), "can't be changed"),
    (RuleOverride(name="mine", metric="nonfinite"), "can't be changed"),
    (RuleOverride(name="not-measured", metric="logit_kl", threshold=1.0), "the service's own"),
    (RuleOverride(name="not-compared", enabled=False), "the service's own"),
    (RuleOverride(name="layerkl", threshold=1.0), "known rules: nonfinite, layer-kl"),
    (RuleOverride(name="layer-kl", factor=2.0), "takes threshold; given: threshold, factor"),
    (RuleOverride(name="new", metric="logit_kl"), "takes threshold; given: none"),
]


@pytest.mark.parametrize(("override", "words"), REFUSED)
def test_an_override_that_makes_no_sense_is_refused(override: RuleOverride, words: str) -> None:
    """Catches NaN that can be made to pass, and a misspelt name that changes nothing."""
    with pytest.raises(ConfigError, match=words):
        merge_rules(DEFAULT_RULES, [override])


COUNTS = {
    "three numbers": ("[1, 2, 3]", "[1, 2, 3] is not allowed"),
    "one number": ("3", "3 is not allowed"),
    "no whole number": ("[2, 5.0]", "[2, 5.0] is not allowed"),
    "true is no number": ("[true, 5]", "[True, 5] is not allowed"),
    "text": ('["2", "5"]', "['2', '5'] is not allowed"),
    "none of some": ("[0, 5]", "[0, 5] is not allowed"),
    "more than all": ("[6, 5]", "[6, 5] is not allowed"),
    "more than anybody waits for": ("[2, 31]", "[2, 31] is not allowed"),
}


@pytest.mark.parametrize(("value", "words"), COUNTS.values(), ids=COUNTS)
def test_what_m_of_n_is_not(value: str, words: str) -> None:
    """Catches a rule that can never fire, and one whose window nobody keeps."""
    rule = tomllib.loads(f'rules = [{{ name = "layer-kl", m_of_n = {value} }}]')
    with pytest.raises(ConfigError) as caught:
        parse(CheckConfig, PLAIN | rule, "file")
    assert str(caught.value) == (
        f"file: rules[0].m_of_n: {words}; allowed: two whole numbers [m, n] with 1 ≤ m ≤ n ≤ 30, "
        "e.g. [2, 5]: two of the last five runs"
    )


def test_m_of_n_as_it_is_written() -> None:
    """Catches a list of TOML that a frozen rule can't hold, or loses in the database."""
    found = parse(CheckConfig, PLAIN | {"rules": [{"name": "layer-kl", "m_of_n": [2, 5]}]}, "file")
    again = parse(CheckConfig, found.model_dump(mode="json"), "database")
    for made in (found, again):
        assert by_name(rules_for(made, made.candidates[0]))["layer-kl"].m_of_n == (2, 5)


def test_two_ways_to_count_exclude_each_other() -> None:
    """Catches a rule of which nobody knows when it fires."""
    both = RuleOverride(name="layer-kl", enter_runs=2, m_of_n=(2, 5))
    with pytest.raises(
        ConfigError, match=r"enter_runs = 2 .* m_of_n = \[2, 5\] exclude each other"
    ):
        merge_rules(DEFAULT_RULES, [both])
    drift = RuleOverride(name="drift", metric="drift", scope="*", enter_runs=2, m_of_n=(2, 5))
    with pytest.raises(ConfigError, match="exclude each other"):
        merge_rules(DEFAULT_RULES, [drift])


def test_a_way_to_count_replaces_the_other() -> None:
    """Catches a candidate that can't go back to runs in a row: TOML knows no way to say nothing."""
    of_check = RuleOverride(name="layer-kl", m_of_n=(2, 5))
    of_candidate = RuleOverride(name="layer-kl", enter_runs=3)
    rule = by_name(merge_rules(DEFAULT_RULES, [of_check], [of_candidate]))["layer-kl"]
    assert rule.entering == (3, None)
    rule = by_name(merge_rules(DEFAULT_RULES, [of_candidate], [of_check]))["layer-kl"]
    assert rule.entering == (2, 5)
