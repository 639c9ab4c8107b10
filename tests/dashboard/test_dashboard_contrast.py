"""What a difference between two candidates means, and what else tells them apart: pure functions."""

import math
from dataclasses import replace
from typing import Any

import pytest

from quantwatch.domain import MODEL, CandidateResult, Comparison, RunResult, Scope
from quantwatch.report.figures import Figures
from quantwatch_dashboard.charts.change import Ratio, change_chart
from quantwatch_dashboard.components import compare
from quantwatch_dashboard.logic import contrast, figures, identities
from quantwatch_dashboard.logic.contrast import Row, Side, finding


def row(a: float | None = 1.0, b: float | None = 2.0, metric: str = "logit_kl", **test: Any) -> Row:
    """Return a row whose difference is established upward, unless something else is given."""
    usual: dict[str, Any] = {"num_prompts": 24, "p": 1e-9, "q": 1e-6, "established": 1, "lost": ()}
    known = usual | test
    found = Comparison(metric, MODEL, value=b or 0, baseline=a or 0, low=0.5, high=1.5, **known)
    return Row(metric, "mean", a, b, found)


@pytest.mark.parametrize(
    ("given", "tone", "words"),
    [
        (row(), "worse", "clearly worse"),
        (row(2.0, 1.0, established=-1), "better", "clearly better"),
        (row(0.9, 0.8, "top1_agreement", established=-1), "worse", "clearly worse"),
        (row(1.0, 1.2, "ppl_ratio"), "worse", "clearly worse"),
        (row(established=0), "same", "within chance"),
        (row(1.0, 1.0, p=1.0, established=0), "same", "equal"),
        (row(1.0, 1.0, p=1.0, established=0, num_prompts=4), "same", "equal"),
        (replace(row(), noise=3.0), "same", "below the noise floor"),
        (row(num_prompts=9), "unknown", "too few prompts to tell: 9"),
        (row(lost=(3, 4)), "unknown", "2 prompts are finite in one only"),
        (row(None), "unknown", "not measured in both"),
        (replace(row(), test=None), "unknown", "not paired"),
        (replace(row(), test=None, statistic="p99"), "unknown", "no test of this number"),
        (contrast.apart(row()), "unknown", "not comparable"),
        (row(1.0, math.nan, lost=(3,)), "worse", "not finite in B alone"),
        (row(math.inf, 1.0, lost=(3,)), "better", "not finite in A alone"),
        (row(math.nan, math.nan, num_prompts=0), "unknown", "too few prompts to tell: 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_marks(given: Row, tone: str, words: str) -> None:
    """Catches a change by chance that is called a regression, and a gain that is called a loss."""
    assert finding(given) == contrast.Finding(tone, words)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(), row(established=0)], "B is clearly worse: Output KL"),
        ([row(2.0, 1.0, established=-1)], "B is clearly better: Output KL"),
        ([row(), row(0.8, 0.9, "top1_agreement")],
         "B is worse in Output KL and better in Top-1 agreement"),
        ([row(established=0)], "No difference beyond chance"),
        ([row(1.0, math.nan, lost=(3,)), row(0.9, 0.8, "top1_agreement")],
         "B is not finite in Output KL; the other one is"),
        ([row(lost=(3,)), row(established=0)],
         "Not all values are finite in both: they can't be told apart"),
        ([row(num_prompts=3)], "Both are shown; whether they differ can't be told"),
    ],
    ids=["worse", "better", "both", "neither", "nan", "lost", "unknown"],
)  # fmt: skip
def test_summary(rows: list[Row], words: str) -> None:
    """Catches a headline that hides the worse half."""
    assert contrast.summary(rows).words == words


def sides(planted: RunResult, *names: str) -> list[Side]:
    """Return candidates of the demo's run."""
    found = [planted.find(name) for name in names]
    return [Side(planted, candidate) for candidate in found if candidate is not None]


def test_both_values_stand_beside_each_other(planted: RunResult) -> None:
    """Catches columns that are swapped, and layers that only one side has."""
    a, b = sides(planted, "int8", "int4-g64")
    rows = {(r.metric, r.statistic): r for r in contrast.headlines(a, b, {})}
    short = replace(b.candidate, measurements=tuple(
        m for m in b.candidate.measurements if m.scope != Scope("layers.29")))  # fmt: skip
    layers = contrast.by_layer(a, Side(planted, short), {}, "lens_kl")

    kl = rows["logit_kl", "mean"]
    assert kl.a is not None
    assert kl.b is not None
    assert kl.a < 0.01 < kl.b
    assert kl.difference == kl.b - kl.a
    assert len(layers) == 30
    assert layers[-1][0] == "layers.29"
    assert layers[-1][1].b is None


def test_what_else_differs(planted: RunResult) -> None:
    """Catches another recipe, version or suite that nobody is told of."""
    a, b = sides(planted, "bf16", "int8")
    other = replace(planted, environment={"torch": "2.12.0", "threads": 1}, suite_hash="b" * 64,
                    config={"candidates": [{"name": "int8", "recipe": {"bits": 8}}]})  # fmt: skip
    found = {(f.group, f.name): f for f in identities.facts(a, replace(b, result=other))}
    differing = {key for key, fact in found.items() if fact.differs}

    assert differing == {
        ("measured", "suite_hash"),
        ("candidate", "execution"),
        ("candidate", "bits per weight"),
        ("candidate", "size"),
        ("candidate", "setting name"),
        ("candidate", "setting recipe.bits"),
        ("environment", "torch"),
    }
    assert found["measured", "suite_hash"].b == "b" * 12 + "…"
    assert found["candidate", "setting recipe.bits"].a == "–"


@pytest.mark.parametrize(
    "ratios",
    [
        [Ratio("layers.0", 1.0)],
        [Ratio("layers.0", 1.08, 1.07, 1.1, 1), Ratio("layers.1", 0.97, 0.9, 1.04)],
        [Ratio("layers.0", 277.0, 250.0, 300.0, 1), Ratio("layers.1", 1e-6, -2.0, 5.0, -1)],
        [Ratio("<b>x</b>", 3.0, -math.inf, math.inf)],
    ],
    ids=["one layer", "nearly equal", "far apart", "hostile name, no bounds"],
)
def test_ratios_are_drawn(ratios: list[Ratio]) -> None:
    """Catches an axis without 1, a bar down to 0 on a log axis, and a name that is markup."""
    figure = change_chart(ratios, unit="B ÷ A")
    (trace,) = figure.data

    assert 1.0 in figure.layout.yaxis.tickvals
    low, high = figure.layout.yaxis.range
    assert low < 0 < high
    down = trace.error_y.arrayminus
    assert all(value - minus > 0 for value, minus in zip(trace.y, down, strict=True))
    assert "<b>x" not in str(trace.x)


def test_measurements_are_indexed_once(planted: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an index of all measurements for each number: seconds for 126 layers."""
    built: list[str] = []

    def counted(candidate: CandidateResult) -> Figures:
        built.append(candidate.name)
        return Figures(candidate)

    monkeypatch.setattr(figures, "Figures", counted)
    a, b = sides(planted, "int8", "int4-g64")
    contrast.headlines(a, b, {})
    contrast.by_layer(a, b, {}, "lens_kl")
    assert sorted(built) == ["int4-g64", "int8"]


@pytest.mark.parametrize("b", [math.nan, math.inf], ids=str)
def test_nothing_is_calculated_with_what_is_not_finite(b: float) -> None:
    """Catches an interval of 0, and "× nan", beside a candidate of NaN."""
    given = row(1.0, b, num_prompts=0)
    assert compare.interval(given) == "–"
    assert "×" not in compare.headline_table([given])
