"""From alerts to verdicts to exit codes."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from quantwatch.alerts.defaults import DEFAULT_RULES
from quantwatch.alerts.exit_codes import exit_code
from quantwatch.alerts.rules import evaluate
from quantwatch.alerts.verdicts import has_improved, run_verdict, verdict_of
from quantwatch.config.default_rules import applies
from quantwatch.domain import (
    Alert,
    CandidateResult,
    RunResult,
    RunStatus,
    Scope,
    Severity,
    Verdict,
)

Build = Callable[..., CandidateResult]
LOCAL_RULES = tuple(rule for rule in DEFAULT_RULES if applies(rule, None))
CRITICAL = Alert(
    "r", "c", "logit_kl", "mean", Scope("model"), 1.0, "finite", 0.1, Severity.CRITICAL, ""
)
WARNING = replace(CRITICAL, severity=Severity.WARNING)
MISSING = replace(CRITICAL, value=None, value_kind="missing")

VERDICTS = [
    ([], {}, "pass"),
    ([], {"improved": True}, "improvement"),
    ([WARNING], {"improved": True}, "warn"),
    ([MISSING, WARNING], {}, "inconclusive"),
    ([replace(MISSING, severity=Severity.WARNING)], {}, "inconclusive"),
    ([MISSING, WARNING, CRITICAL], {}, "regression"),
    ([], {"comparable": False}, "inconclusive"),
    ([], {"comparable": False, "improved": True}, "inconclusive"),
    ([CRITICAL], {"comparable": False}, "regression"),
]


@pytest.mark.parametrize(("alerts", "flags", "verdict"), VERDICTS)
def test_a_verdict_is_the_worst_of_the_alerts(
    alerts: list[Alert], flags: dict[str, bool], verdict: str
) -> None:
    """Catches an order other than regression, inconclusive, warn, improvement, pass."""
    assert verdict_of(alerts, **flags) == verdict


def test_a_run_is_as_good_as_its_worst_candidate() -> None:
    """Catches an average, and a failed candidate that crashes the verdict."""
    of = [CandidateResult(str(v), None, v) for v in (*Verdict, None)]
    assert run_verdict(of) == Verdict.REGRESSION
    assert run_verdict(of[1:]) == Verdict.INCONCLUSIVE
    assert run_verdict([of[-1], of[-2]]) == Verdict.PASS
    assert run_verdict([of[-1]]) is None


CHANGES = [
    ("nothing", 0.002, 0.002, "pass"),
    ("AVX2 instead of AVX-512", 0.002, 0.002 + 1e-9, "pass"),
    ("doubled", 0.002, 0.004, "regression"),
    ("halved", 0.004, 0.002, "improvement"),
    ("a little better", 0.002, 0.0018, "pass"),
]


@pytest.mark.parametrize(
    ("before", "now", "verdict"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES]
)
def test_a_pinned_baseline_finds_what_changed_and_nothing_else(
    candidate: Build, before: float, now: float, verdict: str
) -> None:
    """Catches rounding of another instruction set as a false alarm, and a doubled KL unseen."""
    floors = {("logit_kl", "model"): 5e-12}
    then, this = (candidate(output={"logit_kl": kl}) for kl in (before, now))
    alerts = evaluate(this, LOCAL_RULES, noise_floor=floors, baseline=then)
    improved = has_improved(this, then, LOCAL_RULES, noise_floor=floors)
    assert verdict_of(alerts, improved=improved) == verdict


def test_better_output_with_a_worse_layer_is_no_improvement(candidate: Build) -> None:
    """Catches praise for a build that traded one layer for the average."""
    then = candidate(output={"logit_kl": 0.004}, isolated=0.01)
    worse_layer = {f"layers.{n}": 0.01 for n in range(30)} | {"layers.7": 0.02}
    now = candidate(output={"logit_kl": 0.002}, isolated=worse_layer)
    alerts = evaluate(now, LOCAL_RULES, noise_floor={}, baseline=then)
    improved = has_improved(now, then, LOCAL_RULES, noise_floor={})
    assert (improved, verdict_of(alerts, improved=improved)) == (True, "warn")
    assert [(alert.rule, alert.scope) for alert in alerts] == [
        ("baseline-isolated-error", "layers.7")
    ]


def test_nothing_improves_without_a_baseline(candidate: Build) -> None:
    """Catches a crash or an improvement on the first run."""
    assert not has_improved(candidate(), None, LOCAL_RULES, noise_floor={})


def test_turning_nan_is_no_improvement(candidate: Build) -> None:
    """Catches the finite mean of what is left being praised."""
    then, now = candidate(output={"logit_kl": 0.5}), candidate(output={"logit_kl": 0.1})
    kl = now.find("logit_kl")
    assert kl is not None
    broken = replace(now, measurements=(replace(kl, n_nan=1), *now.measurements[1:]))
    assert has_improved(now, then, LOCAL_RULES, noise_floor={})
    assert not has_improved(broken, then, LOCAL_RULES, noise_floor={})


def result(status: RunStatus, *candidates: tuple[str | None, str | None]) -> RunResult:
    made = tuple(
        CandidateResult(f"c{i}", None, Verdict(v) if v else None, failure=failure)
        for i, (v, failure) in enumerate(candidates)
    )
    now = datetime(2026, 11, 29, tzinfo=UTC)
    return RunResult(
        run_id="01", check="n", status=status, verdict=run_verdict(made), started_at=now,
        finished_at=now, suite_name="s", suite_hash="h", num_tokens=1, num_prompts=1,
        reference=None, capture_sha="c", metrics_version=1, environment={}, config={},
        candidates=made,
    )  # fmt: skip


LOST = (None, "corrupt GGUF")
CODES = [
    (RunStatus.SUCCEEDED, [("pass", None)], 0),
    (RunStatus.SUCCEEDED, [("warn", None), ("improvement", None)], 0),
    (RunStatus.SUCCEEDED, [("pass", None), ("regression", None), ("inconclusive", None)], 1),
    (RunStatus.SUCCEEDED, [LOST, ("regression", None)], 1),
    (RunStatus.SUCCEEDED, [LOST, ("pass", None)], 3),
    (RunStatus.SUCCEEDED, [LOST, ("inconclusive", None)], 3),
    (RunStatus.SUCCEEDED, [LOST], 3),
    (RunStatus.SUCCEEDED, [("inconclusive", None), ("warn", None)], 4),
    (RunStatus.FAILED, [], 3),
    (RunStatus.FAILED, [("regression", None)], 3),
    (RunStatus.MEASURING, [], 3),
    (RunStatus.CANCELLED, [], 130),
]


@pytest.mark.parametrize(("status", "candidates", "code"), CODES)
def test_the_exit_code_of_a_run(
    status: RunStatus, candidates: list[tuple[str | None, str | None]], code: int
) -> None:
    """Catches the monitor's own trouble looking like a regression, or the other way round."""
    assert exit_code(result(status, *candidates)) == code
