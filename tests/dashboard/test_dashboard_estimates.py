"""Estimates are told from measurements, and how good they are is said beside them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.dashboard.invented import Candidate, Spec

from quantwatch.domain import CandidateResult, RunResult, Scope
from quantwatch_dashboard.charts.heatmap import Look, heatmap
from quantwatch_dashboard.components.heatmap_words import caption
from quantwatch_dashboard.logic.difference import ratio
from quantwatch_dashboard.logic.estimates import error_words, layer_errors
from quantwatch_dashboard.logic.grid import TokenGrid, TokenPlace, side_by_side
from quantwatch_dashboard.queries import tokens

SPEC = Spec(num_prompts=2, candidates=(Candidate("int8", 8e-3, estimated=True),))


def grid(estimated: list[list[bool]] | None, prompt: int = 0) -> TokenGrid:
    values = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    places = tuple(TokenPlace(prompt, j, 70 + j, "a") for j in range(3))
    mask: NDArray[np.bool_] | None = None if estimated is None else np.array(estimated)
    names = "layers.0", "layers.1"
    return TokenGrid(names, places, values, np.zeros(values.shape, bool), mask)


MASK = [[True, False, True], [True, False, False]]


def test_a_part_of_a_grid_keeps_what_is_estimated() -> None:
    """Catches marks that stay behind when rows or tokens are chosen."""
    whole = grid(MASK)
    parts = {
        "rows": whole.rows(["layers.1"]), "between": whole.between(1, 2),
        "measured": whole.measured_only(), "normalised": whole.normalised(),
        "difference": ratio(whole, whole.between(1, 2).rows(["layers.0"])),
    }  # fmt: skip
    found = {n: [] if p.estimated is None else p.estimated.tolist() for n, p in parts.items()}
    assert found == {
        "rows": [[True, False, False]], "between": [[False, True], [False, False]],
        "measured": MASK, "normalised": MASK, "difference": [[False, True]],
    }  # fmt: skip


def test_grids_side_by_side() -> None:
    joined = side_by_side([grid(None), grid(MASK, 1)])
    assert joined.estimated is not None
    assert joined.estimated.tolist() == [[False] * 3 + row for row in MASK]
    assert side_by_side([grid(None), grid(None, 1)]).estimated is None


def test_hovering_tells_an_estimate() -> None:
    """Catches an estimate that is read as a measurement."""
    texts = heatmap(grid(MASK), Look("x")).data[0].text
    assert [[t.split("<br>")[0] for t in row] for row in texts] == [
        ["0.100 (estimated)", "0.200", "0.300 (estimated)"],
        ["0.400 (estimated)", "0.500", "0.600"],
    ]
    pooled = heatmap(grid(MASK), Look("x", max_cells=2)).data[0].text
    assert [row[0].split("<br>")[0] for row in pooled] == [
        "0.300 (some estimated)",
        "0.600 (some estimated)",
    ]
    plain = heatmap(grid(None), Look("x")).data[0].text
    assert "estimated" not in str(plain)


def test_the_caption_counts_what_was_measured(save_run: Callable[[Spec], RunResult]) -> None:
    """Catches estimates without a word on how good they are."""
    (candidate,) = save_run(SPEC).candidates
    shown = caption(grid(MASK), "lens_kl", "log", candidate)
    assert "3 of 6 cells were measured, the others are estimates. Estimates, held" in shown
    plain = caption(grid(None), "lens_kl", "log", candidate)
    assert "6 of 6 cells were measured." in plain
    assert "stimate" not in plain


def test_stored_cells_without_an_error_are_estimates(
    save_run: Callable[[Spec], RunResult], empty_url: str
) -> None:
    """Catches marks on other metrics, and runs without estimates that get some."""
    run = save_run(SPEC)
    found = tokens.grid(empty_url, (run.run_id, "int8", "lens_kl", 0), run.suite_hash)
    assert found is not None
    assert found.estimated is not None
    assert found.num_measured == 30 * 64
    assert (~found.estimated).sum() == 30 * 8
    rel = tokens.grid(empty_url, (run.run_id, "int8", "rel_error", 0), run.suite_hash)
    assert rel is not None
    assert rel.estimated is None
    plain = save_run(Spec(check="plain", run_id="01JPLAIN", num_prompts=2))
    other = tokens.grid(empty_url, (plain.run_id, "int8", "lens_kl", 0), plain.suite_hash)
    assert other is not None
    assert other.estimated is None


def test_the_estimate_is_a_row_of_its_own(save_run: Callable[[Spec], RunResult]) -> None:
    """The exact sample's row says what it said; the estimate's says that it is one."""
    (candidate,) = save_run(SPEC).candidates
    exact = candidate.find("lens_kl", "layers.3")
    estimated = candidate.find("lens_kl_estimated", "layers.3")
    assert exact is not None
    assert estimated is not None
    assert (exact.n, exact.method) == (2 * 8, "sampled positions")
    assert (estimated.n, estimated.method) == (2 * 64, "estimated")


def test_errors_are_said_with_their_interval(save_run: Callable[[Spec], RunResult]) -> None:
    (candidate,) = save_run(SPEC).candidates
    errors = layer_errors(candidate)
    assert len(errors) == 30
    assert errors[0].token == pytest.approx(0.02 / 1.02, rel=1e-5)
    assert errors[0].mean == pytest.approx(0.02, rel=1e-4)
    words = error_words(candidate)
    assert "held against the 16 tokens that the lens read in full" in words
    assert "off by 1.96 % in the median of the worst layer (layers." in words
    assert "a mean by 2.00 ± " in words


def test_layers_without_a_difference_have_no_relative_error(
    save_run: Callable[[Spec], RunResult],
) -> None:
    """Catches a division by zero, and one prompt that has an interval."""
    (candidate,) = save_run(SPEC).candidates
    rows = tuple(
        replace(m, mean=0.0) if m.metric == "lens_kl" else replace(m, se=None)
        for m in candidate.measurements
    )
    same = CandidateResult("c", None, None, rows)
    assert layer_errors(same) == []
    assert error_words(same) == "Estimates: no layer differs where the lens read every id, too."
    one = tuple(replace(m, se=None) for m in candidate.measurements)
    assert layer_errors(CandidateResult("c", None, None, one))[0].interval is None
    assert layer_errors(CandidateResult("c", None, None, ())) == []
    assert Scope("layers.0") == layer_errors(candidate)[0].scope
