"""Axes, bars and derived figures of the reports."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.domain import Scope, Severity
from quantwatch.report.figures import Figures, forward_order
from quantwatch.report.numbers import MISSING, Number
from quantwatch.report.side_by_side import side_by_side
from quantwatch.report.svg import LogAxis, bars, interval
from quantwatch.report.words import explanation, worst_first

POSITIVE = st.floats(min_value=1e-300, max_value=1e300)


@given(st.lists(st.floats(min_value=0, max_value=1e300), max_size=8))
def test_axis_places_every_value_inside(values: list[float]) -> None:
    """A bar outside its box hides or covers another; 0 and no values at all must not divide by 0."""
    axis = LogAxis.over(values)
    assert axis.low < axis.high
    assert all(0 <= axis.place(value) <= 1 for value in values)


@given(POSITIVE, POSITIVE)
def test_axis_keeps_the_order(a: float, b: float) -> None:
    """The larger error has the longer bar."""
    axis = LogAxis.over([a, b])
    assert (axis.place(a) <= axis.place(b)) or a > b


@given(st.lists(POSITIVE, min_size=1, max_size=8))
def test_axis_spans_at_most_eight_decades(values: list[float]) -> None:
    """One value of 1e-300 must not press all others against the top."""
    axis = LogAxis.over(values)
    assert axis.high - axis.low <= 8
    assert axis.place(max(values)) >= 0.5


def test_bars_of_zero_and_unmeasured_layers_are_absent() -> None:
    """Exactly 0 is the best result and has no bar; not measured has none either."""
    numbers = [Number(0.0), MISSING, Number(1e-3), Number(None, "nan")]
    drawn = bars(numbers, [f"layers.{i}" for i in range(4)], frozenset(), "t")
    assert re.findall(r"<title>(.*?)</title>", drawn) == ["layers.2: 0.001", "layers.3: NaN"]


def test_interval_shows_value_range_and_limit() -> None:
    """The limit is drawn beside the interval: whether it is inside is what decides."""
    drawn = interval(Number(0.1), (0.05, 0.2), 0.15, LogAxis(-2, 0))
    assert all(part in drawn for part in ('class="range"', 'class="limit"', "<circle"))
    assert "<circle" not in interval(Number(None, "nan"), None, 0.15, LogAxis(-2, 0))


def test_forward_order() -> None:
    """Reports list places as data flows through them."""
    scopes = ["head", "layers.10", "layers.2.mlp", "final_norm", "layers.2", "embedding"]
    expected = ["embedding", "layers.2.mlp", "layers.2", "layers.10", "final_norm", "head"]
    assert sorted(scopes, key=forward_order) == expected


def test_worst_layers_put_nan_first_and_leave_out_the_unmeasured(make: Any) -> None:
    """NaN sorts anywhere as a float: here it is the worst there is."""
    values = {"layers.0": 0.1, "layers.1": 0.3, "layers.2": None, "layers.3": 0.3}
    rows = [make.row("rel_error", s, v, n_nan=0 if v else 9) for s, v in values.items()]
    figures = Figures(make.candidate(measurements=(*rows, make.row("cosine", "layers.4", 1.0))))
    worst = figures.worst("rel_error", figures.layers, 9)
    assert worst == ["layers.2", "layers.1", "layers.3", "layers.0"]


def test_interval_needs_a_standard_error(make: Any) -> None:
    """Without two prompts there is no interval, neither of a mean nor of a ratio."""
    rows = (make.row("nll_difference", "model", 0.1, se=None), make.row("logit_kl", "model", 0.2))
    figures = Figures(make.candidate(measurements=rows))
    assert figures.interval("ppl_ratio") is None
    assert figures.interval("logit_kl") == pytest.approx((0.2 - 1.96 * 0.02, 0.2 + 1.96 * 0.02))


@given(st.one_of(st.none(), st.floats()))
def test_numbers_are_finite_or_have_a_kind(value: float | None) -> None:
    """Whatever a metric returns can be written as strict JSON."""
    for number in (Number.of(value), Number.of(value).exp()):
        assert (number.value is None) == (number.kind != "finite")
        assert number.value is None or math.isfinite(number.value)
        assert number.text()


@pytest.mark.parametrize("equal", [False, True], ids=["differs", "bit-equal"])
def test_leaked_mass_is_said(make: Any, equal: bool) -> None:
    """A wider vocabulary passes, but the mass it takes away is reported."""
    rows = (*make.rows(), make.row("leaked_mass", "model", 0.0272))
    said = explanation(make.candidate(measurements=rows, bit_equal=equal))
    assert "Leaked mass 0.0272 outside the shared vocabulary." in said
    assert "Leaked" not in explanation(make.candidate(bit_equal=equal))


def test_alerts_worst_first(make: Any) -> None:
    """With room for eight alerts, the eight worst are shown, and NaN before all of them."""
    alerts = [
        make.alert(rule="b", scope=Scope("layers.0"), severity=Severity.WARNING),
        make.alert(rule="a", scope=Scope("layers.1"), value=0.2),
        make.alert(rule="a", scope=Scope("layers.2"), value=0.9),
        make.alert(rule="a", scope=Scope("layers.3"), value=None, value_kind="nan"),
    ]
    order = [alert.scope for alert in worst_first(alerts)]
    assert order == ["layers.3", "layers.2", "layers.1", "layers.0"]


def test_two_single_candidates_are_paired(make: Any) -> None:
    """Two comparisons with other recipes stand side by side though their names differ."""
    rows = side_by_side(make.run(make.candidate("int8")), make.run(make.candidate("int4")))
    assert {row["candidate"] for row in rows} == {"int8 → int4"}
    assert [row["change"] for row in rows if row["figure"] == "logit_kl.mean"] == [0.0]
