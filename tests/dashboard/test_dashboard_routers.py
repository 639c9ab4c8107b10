"""Routers on the run page: the layer table, the metric picker, a heatmap, the check's trend."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.dashboard.invented import DEMO, Spec, make_observation
from tests.dashboard.invented_runs import make_run
from tests.dashboard.pages import html, open_page

from quantwatch.domain import ExpertLoad, Scope, TokenMatrix
from quantwatch.metrics.aggregate import Aggregator
from quantwatch.store import runs
from quantwatch.store.session import open_database

RUN = "01JM" + "0" * 22
PLACES = (Scope("layers.3"), Scope("layers.4"))
NAME = DEMO[-1].name


@pytest.fixture
def routed(empty_url: str, tmp_path: Path) -> str:
    """A run whose last candidate has routers in two layers; those of layers.4 disagree."""
    spec = Spec(run_id=RUN, candidates=DEMO)
    result, suite, blocks = make_run(spec)
    with Aggregator(suite, tmp_path / "spool") as sink:
        for prompt in suite.prompts:
            made = make_observation(spec, DEMO[-1], prompt, np.random.default_rng(prompt.index))
            row = np.ones(prompt.num_scored)
            values = {
                "router_overlap": (1, 0.5),
                "router_weight_l1": (0, 0.75),
                "router_flips": (0, 1),
            }
            found = tuple(
                TokenMatrix(name, PLACES, np.stack([row * a, row * b]))
                for name, (a, b) in values.items()
            )
            loads = tuple(ExpertLoad(at, np.array([2, 2]), np.array([3, 1])) for at in PLACES)
            sink.observe(replace(made, matrices=(*made.matrices, *found), loads=loads))
        measured = replace(result.candidates[-1], measurements=sink.measurements(NAME))
        kept = [b for b in blocks if b.candidate != NAME] + list(sink.blocks(NAME))
    database = open_database(empty_url)
    runs.begin_run(database, run_id=RUN, check="demo", config={}, started_at=result.started_at)
    done = replace(result, candidates=(*result.candidates[:-1], measured))
    runs.finish_run(database, done, suite, kept)
    database.close()
    return empty_url


def test_layer_table_and_picker(routed: str) -> None:
    """Catches columns that are missing, and a metric that can't be chosen."""
    page = open_page("run", run=RUN, candidate=NAME, sort="router_overlap")
    shown = html(page)
    for title in ("Router overlap", "Router weight L1", "Router flips", "Load shift", "Peak load"):
        assert title in shown
    first = shown.index(">layers.4<", shown.index("Router overlap"))
    assert first < shown.index(">layers.3<", shown.index("Router overlap"))
    (metric,) = (box for box in page.selectbox if box.label == "Metric")
    assert "Router weight L1" in metric.options


def test_a_heatmap_of_routers(routed: str) -> None:
    """Catches a picture on another scale, and one that says the lens read a sample."""
    shown = html(open_page("run", run=RUN, candidate=NAME, metric="router_weight_l1"))
    assert re.search(r"Worst: 0\.75\d? at layers\.4", shown)
    assert "Colors are logarithmic" in shown


def test_other_candidates_have_no_such_columns(routed: str) -> None:
    page = open_page("run", run=RUN, candidate=DEMO[0].name)
    assert "Peak load" not in html(page)
