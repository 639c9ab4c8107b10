"""What changed since the baseline, named for what it is, and rules that fire on it alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from quantwatch.alerts.outcomes import outcomes
from quantwatch.alerts.rules import evaluate
from quantwatch.alerts.verdicts import verdict_of
from quantwatch.baselines.drift import drift
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import CandidateResult, Json, RunResult, Verdict
from quantwatch.domain.drift import baseline_moved, headline

ENVIRONMENT = {
    "python": "3.11.7",
    "platform": "Linux-6.1",
    "libraries": {"torch": "2.13", "numpy": "2.1"},
    "cpu": {"threads": 2, "capability": "AVX2"},
    "gpus": [{"uuid": "GPU-1", "name": "H200", "driver": "575.1"}],
    "git_commit": "a" * 40,
}
Run = RunResult
MakeRun = Callable[..., Run]


@pytest.fixture
def night(run: MakeRun) -> Run:
    return run(environment=ENVIRONMENT)


def _environment(**changes: Any) -> dict[str, Any]:
    return ENVIRONMENT | changes


def _with_digest(run: Run, *, reference: bool, **digests: str) -> Run:
    def other(variant: Any) -> Any:
        return replace(variant, fingerprint=replace(variant.fingerprint, **digests))

    if reference:
        return replace(run, reference=other(run.reference))
    cand = run.candidates[0]
    return replace(run, candidates=(replace(cand, variant=other(cand.variant)),))


CASES: list[Any] = [
    pytest.param(
        lambda r: replace(r, environment=_environment(libraries={"torch": "2.14", "numpy": "2.1"})),
        [("environment.libraries.torch", "library", "2.14", "2.13")],
        id="library",
    ),
    pytest.param(
        lambda r: replace(r, environment=_environment(libraries={"torch": "2.13"})),
        [("environment.libraries.numpy", "library", "absent", "2.1")],
        id="library gone",
    ),
    pytest.param(
        lambda r: replace(
            r,
            environment=_environment(gpus=[{**ENVIRONMENT["gpus"][0], "driver": "580.2"}]),  # type: ignore[index]
        ),
        [("environment.gpus.0.driver", "driver", "580.2", "575.1")],
        id="driver",
    ),
    pytest.param(
        lambda r: replace(r, environment=_environment(gpus="not available: no driver")),
        [
            ("environment.gpus", "gpu", "not available: no driver", "absent"),
            ("environment.gpus.0.uuid", "gpu", "absent", "GPU-1"),
            ("environment.gpus.0.name", "gpu", "absent", "H200"),
            ("environment.gpus.0.driver", "driver", "absent", "575.1"),
        ],
        id="GPU gone",
    ),
    pytest.param(
        lambda r: replace(r, environment=_environment(cpu={"threads": 4, "capability": "AVX512"})),
        [
            ("environment.cpu.threads", "threads", 4, 2),
            ("environment.cpu.capability", "cpu", "AVX512", "AVX2"),
        ],
        id="threads and CPU",
    ),
    pytest.param(
        lambda r: replace(r, environment=_environment(git_commit="b" * 40)),
        [("environment.git_commit", "kernel commit", "b" * 40, "a" * 40)],
        id="commit",
    ),
    pytest.param(
        lambda r: _with_digest(r, reference=False, weights_sha="w2", recipe_sha="r2"),
        [
            ("weights_sha", "weights", "w2", "int8-weights"),
            ("recipe_sha", "recipe", "r2", "int8-recipe"),
        ],
        id="candidate's weights and recipe",
    ),
    pytest.param(
        lambda r: _with_digest(r, reference=True, weights_sha="w2"),
        [("reference.weights_sha", "reference", "w2", "ref-weights")],
        id="reference moved",
    ),
    pytest.param(
        lambda r: replace(r, suite_hash="s2"),
        [("suite_hash", "measured", "s2", "s" * 64)],
        id="other prompts",
    ),
    pytest.param(lambda r: r, [], id="nothing"),
]


@pytest.mark.parametrize(("change", "expected"), CASES)
def test_a_change_has_a_name_and_a_part(
    night: Run, change: Callable[[Run], Run], expected: list[tuple[str, str, Any, Any]]
) -> None:
    """Catches a driver taken for new weights, or a list of GPUs compared as one blob (N7, N8)."""
    before = replace(night, suite_hash="s" * 64)
    after = change(before)
    found = [
        (r["name"], r["part"], r["value"], r["baseline"]) for r in drift(after, before, "int8")
    ]
    assert found == expected


def test_a_new_candidate_has_not_drifted(night: Run) -> None:
    """Catches an alert on weights because the baseline was measured without the candidate."""
    before = replace(night, candidates=())
    assert drift(night, before, "int8") == ()
    failed = replace(night, candidates=(CandidateResult("int8", None, None, failure="gone"),))
    assert drift(failed, night, "int8") == ()


def test_a_reference_that_moved_is_never_a_regression(night: Run) -> None:
    """Catches "the candidate became worse" when it was the reference that changed (N8)."""
    moved = _with_digest(night, reference=True, weights_sha="f" * 64)
    moved = replace(moved, environment=_environment(python="3.12.1"))
    records = drift(moved, night, "int8")
    assert baseline_moved(records)
    assert headline(records).startswith("baseline moved: reference.weights_sha ref-weights → fff")
    assert headline(records).endswith("python 3.11.7 → 3.12.1")
    assert "f" * 13 not in headline(records), "digests are shortened"
    [alert] = evaluate(_judged(records), [_rule("reference.*")], noise_floor={})
    assert verdict_of([alert]) is Verdict.WARN


def test_headline_names_few_and_counts_the_rest(night: Run) -> None:
    """Catches a message that is a page long after an upgrade of everything."""
    libraries = {f"library{i}": "2" for i in range(9)}
    records = drift(replace(night, environment=_environment(libraries=libraries)), night, "int8")
    assert headline(records).count("→") == 4
    assert headline(records).endswith("; 7 more")
    assert headline([]) == ""


RECORDS: tuple[Json, ...] = (
    {"name": "environment.libraries.torch", "part": "library", "value": "2", "baseline": "1"},
    {"name": "weights_sha", "part": "weights", "value": "b", "baseline": "a"},
    {"metric": "logit_kl", "scope": "model", "value": 1.0, "baseline": 0.5},
)


def _judged(records: tuple[Json, ...]) -> CandidateResult:
    return CandidateResult("int8", None, None, baseline_differences=records)


def _rule(*scope: str, **fields: Any) -> RuleConfig:
    return RuleConfig(name="watch", metric="drift", scope=scope, **fields)


@pytest.mark.parametrize(
    ("scope", "count"),
    [
        (("environment.libraries.torch",), 1),
        (("environment.*",), 1),
        (("*",), 2),
        (("weights_sha", "environment.*"), 2),
        (("environment.gpus.*",), 0),
        (("reference.*",), 0),
    ],
)
def test_a_rule_fires_on_drift_alone(scope: tuple[str, ...], count: int) -> None:
    """Catches a rule that needs worse numbers, or that fires on what it does not watch."""
    candidate = _judged(RECORDS)
    alerts = evaluate(candidate, [_rule(*scope)], noise_floor={})
    assert [alert.value for alert in alerts] == ([float(count)] if count else [])
    [outcome] = outcomes(candidate, [_rule(*scope)], noise_floor={})
    assert outcome.outcome == ("breach" if count else "clear")
    if count:
        assert "→" in outcome.words


def test_without_a_baseline_nothing_is_said() -> None:
    """Catches an open drift alert that is resolved because the baseline was unpinned."""
    [outcome] = outcomes(_judged(()), [_rule("*")], noise_floor={})
    assert outcome.outcome == "missing"
    baseline = CandidateResult("int8", None, Verdict.PASS)
    [outcome] = outcomes(_judged(()), [_rule("*")], noise_floor={}, baseline=baseline)
    assert outcome.outcome == "clear"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "'model' is nothing that may drift; allowed are globs over weights_sha"),
        ({"scope": "environment.libraries.trch"}, "'environment.libraries.trch' is nothing"),
        ({"scope": ("weights_sha", "layers.*")}, "'layers.*' is nothing that may drift"),
        ({"scope": ()}, "scope is empty"),
        ({"scope": "*", "threshold": 1.0}, "takes scope only"),
        ({"scope": "*", "kind": "baseline", "min_effect": 1.0}, "takes scope only"),
        ({"scope": "*", "statistic": "p99"}, "takes scope only"),
    ],
)
def test_impossible_rules_are_refused(fields: dict[str, Any], problem: str) -> None:
    """Catches a rule that never fires because of a typing error."""
    with pytest.raises(ValidationError, match="1 validation error") as caught:
        RuleConfig(name="watch", metric="drift", **fields)
    assert problem in str(caught.value)


def test_misspelt_metrics_are_told_of_drift() -> None:
    """Catches a list of allowed metrics without this one."""
    with pytest.raises(ValidationError, match="drift"):
        RuleConfig(name="watch", metric="drfit", threshold=1.0)
