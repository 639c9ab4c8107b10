"""One check, as its page reads it from a filled database."""

from typing import Any

import pytest

from quantwatch.domain import Verdict
from quantwatch.errors import UserError
from quantwatch.store import applied
from quantwatch_dashboard.logic.naming import Statistic
from quantwatch_dashboard.queries import check as check_queries
from quantwatch_dashboard.queries import configured, overview, runs


def test_a_check_with_its_nights(demo_url: str) -> None:
    """Catches a trend, its marks and its picker that speak of different runs."""
    summary = check_queries.summary(demo_url, "demo")
    trend = check_queries.trend(demo_url, "demo")
    marks = check_queries.marks(demo_url, "demo")

    assert summary.decided is not None
    assert summary.decided.verdict is Verdict.REGRESSION
    brief = {one.check: one for one in overview.checks(demo_url)}
    assert overview.with_trends(demo_url, [brief["demo"]]) == (summary,)
    assert (brief["demo"].now, brief["demo"].bands) == (summary.now, summary.bands)
    assert {p.run_id for p in trend} == {m.run_id for m in marks if m.verdict is not None}
    assert {p.candidate for p in trend} == set(summary.candidates)
    assert {p.floor for p in trend} == {3e-9}
    places = check_queries.places(demo_url, summary.decided.run_id)
    assert ("lens_kl", "layers.14") in places
    assert len(places) == len(set(places))


def test_any_statistic_at_any_place(demo_url: str) -> None:
    """Catches a trend that always shows the mean, or the whole model."""
    shown = Statistic("lens_kl", "layers.14", "p99")
    own, whole = check_queries.trend(demo_url, "demo", shown), check_queries.trend(demo_url, "demo")
    run = runs.result(demo_url, own[-1].run_id)
    row = run.candidates[-1].find("lens_kl", "layers.14")

    assert row is not None
    assert own[-1].value == row.p99
    assert own[-1].value != whole[-1].value
    with pytest.raises(UserError, match="p98"):
        check_queries.trend(demo_url, "demo", Statistic("lens_kl", "layers.14", "p98"))
    assert check_queries.trend(demo_url, "demo", Statistic("no_such", "layers.14", "mean")) == ()


def test_quality_against_size(demo_url: str) -> None:
    """Catches bits per weight that a run does not keep."""
    found = {each.candidate: each for each in check_queries.pareto(demo_url, "demo")}

    assert {name: each.bits_per_weight for name, each in found.items()} == {
        "bf16": 16.0, "int8": 8.13, "int4-g64": 4.75, "int8-fault": 8.13,
    }  # fmt: skip
    assert found["int8"].is_best
    assert not found["int8-fault"].is_best


def test_an_unknown_check_is_named(demo_url: str) -> None:
    """Catches an empty page, or a traceback, for an address with another check."""
    with pytest.raises(UserError, match="no check 'nightli'"):
        check_queries.summary(demo_url, "nightli")
    assert check_queries.trend(demo_url, "nightli") == ()
    assert check_queries.marks(demo_url, "nightli") == ()


def test_what_a_check_would_measure_is_not_read_at_every_click(
    demo_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches all applied checks read and parsed once per rerun, for the state of one button."""
    real, reads = applied.applied_checks, []

    def counted(session: Any) -> Any:
        reads.append(1)
        return real(session)

    configured.why_not.clear()
    monkeypatch.setattr(applied, "applied_checks", counted)
    said = [configured.why_not(demo_url, "compare") for _ in range(3)]
    assert len(reads) == 1
    assert said[0].startswith("Check 'compare' is not among those that the service works with")
    assert said == said[:1] * 3
