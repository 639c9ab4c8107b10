"""From records to what the pages say: pure functions on a run with a planted fault."""

import csv
import io
import math
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.dashboard.invented import Candidate, Spec
from tests.dashboard.invented_runs import make_run

from quantwatch.domain import Alert, RunResult, Scope, Severity, Verdict
from quantwatch.metrics.registry import METRICS
from quantwatch_dashboard.components.layers import columns, layer_table, worst_first
from quantwatch_dashboard.logic import series
from quantwatch_dashboard.logic.exports import layer_csv
from quantwatch_dashboard.logic.focus import MATRICES, RANGES
from quantwatch_dashboard.logic.grid import TokenGrid, TokenPlace
from quantwatch_dashboard.logic.layer_rows import LayerRow, layer_rows
from quantwatch_dashboard.logic.summaries import worst

NIGHT = timedelta(days=1)
START = datetime(2026, 11, 1, tzinfo=UTC)


def test_lines_cover_every_layer_and_candidate(planted: RunResult) -> None:
    """Catches layers in text order (10 before 2) and a candidate without a line."""
    places = series.layers(planted)
    lines = series.lens_lines(planted, "int8-fault", "mean")

    assert places == tuple(f"layers.{i}" for i in range(30))
    assert [line.name for line in lines] == ["bf16", "int8", "int4-g64", "int8-fault"]
    assert [line.strong for line in lines] == [False, False, False, True]
    before, at = (lines[3].values[i] for i in (13, 14))
    assert before is not None
    assert at is not None
    assert before < 0.01
    assert at > 0.15


def test_only_the_planted_layer_is_marked(planted: RunResult) -> None:
    """Catches an annotation on the largest of equally large errors: that is nobody's fault."""
    part = series.culprit_part(planted.candidates[3])
    lines = series.isolated_lines(planted, "int8-fault", part)
    places = series.isolated_places(planted, part)

    assert part == "mlp.down_proj"
    assert [sorted(line.marked) for line in lines] == [
        [],
        [],
        [],
        [places.index("layers.14.mlp.down_proj")],
    ]
    assert lines[3].label == "layers.14.mlp.down_proj"
    assert series.outlier(planted, planted.candidates[3]) == "layers.14"
    assert series.outlier(planted, planted.candidates[2]) is None


def test_spike_is_the_planted_place(planted: RunResult) -> None:
    """Catches a spike where nothing stands out, and one at another place than the headline's."""
    found = series.spike(planted, planted.candidates[3])

    assert found is not None
    assert (found.part, found.places[found.at]) == ("mlp.down_proj", "layers.14.mlp.down_proj")
    assert found.values[found.at] == max(v for v in found.values if v is not None)
    assert series.spike(planted, planted.candidates[2]) is None


def test_nan_of_another_origin_is_no_spike(tmp_path: Path) -> None:
    """Catches a red bar at a layer whose own error is as small as its neighbours'."""
    poisoned = Candidate("nan", 8e-3, Verdict.REGRESSION, nan_layer=9)
    run = make_run(Spec(num_prompts=1, candidates=(poisoned,)))[0]

    assert series.outlier(run, run.candidates[0]) == "layers.9"
    assert series.spike(run, run.candidates[0]) is None


@pytest.mark.parametrize(
    ("rules", "threshold"),
    [
        ([], 0.15),
        ([{"name": "layer-kl", "threshold": 0.4}], 0.4),
        ([{"name": "other"}], 0.15),
        ([{"name": "layer-kl", "threshold": 0.0}], 0.0),
    ],
    ids=["default", "overridden", "another rule", "must be equal"],
)
def test_lens_threshold(planted: RunResult, rules: list[dict[str, Any]], threshold: float) -> None:
    """Catches a line at 0.15 in a run that was judged by another limit."""
    quiet = replace(planted, alerts=(), config={"rules": rules})

    assert series.lens_threshold(quiet) == threshold


@pytest.mark.parametrize(
    ("kind", "threshold"), [("absolute", 0.19), ("baseline", 0.15), ("median_ratio", 0.15)]
)
def test_only_a_fixed_limit_is_a_line(planted: RunResult, kind: str, threshold: float) -> None:
    """Catches one candidate's baseline drawn as the limit of all of them."""
    alert = Alert("own", "int8", "lens_kl", "mean", Scope("layers.3"), 0.3, "finite", 0.19,
                  Severity.CRITICAL, "x")  # fmt: skip
    run = replace(planted, alerts=(alert,), config={"rules": [{"name": "own", "kind": kind}]})

    assert series.lens_threshold(run) == threshold


def test_layer_csv_is_exact(planted: RunResult) -> None:
    """Catches rounded numbers, and NaN or unmeasured cells that are written as 0."""
    rows = layer_rows(planted.candidates[3])
    odd = replace(rows[0], mean_kl=math.nan, max_kl=math.inf, p99_kl=None)
    read = list(csv.DictReader(io.StringIO(layer_csv([odd, *rows[1:]]).decode())))

    assert len(read) == 30
    assert (read[0]["mean_kl"], read[0]["max_kl"], read[0]["p99_kl"]) == ("nan", "inf", "")
    row = planted.candidates[3].find("lens_kl", "layers.14")
    assert row is not None
    assert float(read[14]["mean_kl"]) == row.mean


def test_worst_tokens_lead_with_nan() -> None:
    """Catches NaN tokens that sort behind every number."""
    places = tuple(TokenPlace(0, j, j, "x") for j in range(4))
    values = np.array([[1.0, math.nan, 3.0, 9.0]])
    grid = TokenGrid(("model",), places, values, np.array([[False, False, False, True]]))

    assert [token.place.position for token in worst([grid], 2)] == [1, 2]


def layer(name: str, mean_kl: float | None, num_nonfinite: int = 0) -> LayerRow:
    return LayerRow(name, mean_kl, 0.02, None, 1.0, math.inf, 0.0048, num_nonfinite)


def test_layer_table_is_worst_first_by_number() -> None:
    """Catches 9e−5 that is sorted above 1, NaN at the end, and "not measured" at the top."""
    rows = [layer("a", 9e-5), layer("b", None), layer("c", 1.0), layer("d", math.nan)]

    assert [row.layer for row in worst_first(rows, "mean_kl")] == ["d", "c", "a", "b"]
    assert [row.layer for row in worst_first(rows, "layer")] == ["a", "b", "c", "d"]


def test_layer_table_tells_nan_from_not_measured() -> None:
    """Catches cells that are all "None", digits that differ by column, and an unmarked layer."""
    shown = layer_table([layer("layers.0", math.nan, 1234), layer("layers.1", 9e-5)], "layers.1")
    cells = re.findall(r"<td class=\"([^\"]*)\">([^<]*)</td>", shown)

    assert [value for _, value in cells] == [
        "layers.0", "NaN", "0.0200", "not measured", "1.00", "+∞", "0.00480", "1,234",
        "layers.1", "9.00e−5", "0.0200", "not measured", "1.00", "+∞", "0.00480", "0",
    ]  # fmt: skip
    assert ["qw-marked" in classes for classes, _ in cells] == [False] * 8 + [True] * 8


def test_router_columns_where_there_are_routers() -> None:
    """Catches a mixture without its columns, dense models with empty ones, and 0.2 sorted last."""
    dense = [layer("layers.0", 1.0)]
    routed = [
        replace(layer(f"layers.{n}", 1.0), routers={"router_overlap": overlap, "router_flips": 0.5})
        for n, overlap in enumerate((0.9, 0.2, None, math.nan))
    ]

    assert "Router overlap" not in layer_table(dense, None)
    shown = layer_table(routed, None)
    assert [name in shown for name in ("Router overlap", "Router flips", "Load shift")] == [
        True
    ] * 3
    assert columns(routed)["router_load_max"] == "Peak load"
    worst = [row.layer for row in worst_first(routed, "router_overlap")]
    assert worst == ["layers.3", "layers.1", "layers.0", "layers.2"]


def test_router_figures_are_those_of_the_run(planted: RunResult) -> None:
    """Catches a column that shows another metric."""
    candidate = planted.candidates[0]
    row = next(m for m in candidate.measurements if m.scope == "layers.2")
    names = (
        "router_overlap", "router_weight_l1", "router_flips", "router_load_tv", "router_load_max",
    )  # fmt: skip
    found = tuple(replace(row, metric=m, mean=n / 8) for n, m in enumerate(names))
    rows = layer_rows(replace(candidate, measurements=(*candidate.measurements, *found)))

    assert [rows[2].value(name) for name in names] == [n / 8 for n in range(5)]
    assert rows[1].value("router_overlap") is None
    assert "router_weight_l1" in MATRICES
    assert set(RANGES) == set(MATRICES) == {s.slug for s in METRICS.values() if s.token_block} - {
        "logit_kl", "js", "lens_kl_error",
    }  # fmt: skip
