"""The compare page: any two candidates, what can't be compared, and everything in its address."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.dashboard.invented import START, Candidate, Spec
from tests.dashboard.pages import figures, html, open_page

from quantwatch.domain import RunResult, RunStatus, Verdict
from quantwatch_dashboard.queries import compare as compare_queries

SaveRun = Callable[[Spec], RunResult]
SMALL = (Candidate("int8", 8e-3, bits=8.13), Candidate("int4-g64", 1.1e-1, Verdict.WARN, bits=4.75))
LATER = {"run_id": "01JB", "started_at": START + timedelta(days=1)}


def spec(**values: object) -> Spec:
    """Return a small run with prompts enough for a test."""
    usual = Spec(run_id="01JA", candidates=SMALL, num_layers=4, num_prompts=12, num_tokens=24)
    return replace(usual, **values)  # type: ignore[arg-type]


def test_a_pair_of_runs(save_run: SaveRun) -> None:
    """Catches a change that both runs show and the page does not, or one by chance that it does."""
    save_run(spec())
    save_run(spec(drift=1.2, **LATER))
    page = open_page("compare", run_a="01JA", run_b="01JB", candidate_a="int8", candidate_b="int8")
    shown = html(page)

    assert "B is clearly worse: Output KL" in shown
    assert "12 prompts" in shown
    assert len(figures(page)) == 3
    assert page.query_params["run_a"] == "01JA"


def test_swapped_sides(save_run: SaveRun) -> None:
    """Catches a swap that changes the runs but not the candidates, or turns no sign."""
    save_run(spec())
    save_run(spec(drift=1.2, **LATER))
    page = open_page("compare", run_a="01JA", run_b="01JB", candidate_a="int8", candidate_b="int8")
    page.button(key="swap").click().run()

    assert not page.exception
    assert page.query_params["run_a"] == "01JB"
    assert "B is clearly better: Output KL" in html(page)


def test_two_candidates_of_one_run(save_run: SaveRun) -> None:
    """Catches a page that holds a candidate against itself when the run has another one."""
    save_run(spec())
    page = open_page("compare", run_a="01JA", run_b="01JA")
    shown = html(page)
    import re

    print(re.sub("<[^>]*>", " ", shown)[:1500])

    assert page.query_params["candidate_a"] != page.query_params["candidate_b"]
    assert "B is clearly worse" in shown
    assert "bits per weight" in shown


def test_a_candidate_against_itself(save_run: SaveRun) -> None:
    """Catches a test of equal numbers, or a traceback."""
    save_run(spec())
    same = {"candidate_a": "int8", "candidate_b": "int8"}

    shown = html(open_page("compare", run_a="01JA", run_b="01JA", **same))
    assert "Both sides are the same candidate of the same run" in shown


@pytest.mark.parametrize(
    ("other", "why"),
    [({"num_tokens": 32}, "other prompts"), ({"num_layers": 6}, "other prompts"),
     ({"num_prompts": 11}, "another number of prompts is measured")],
    ids=["another suite", "another model", "other prompts"],
)  # fmt: skip
def test_what_cannot_be_compared_says_why(
    save_run: SaveRun, other: dict[str, int], why: str
) -> None:
    """Catches a difference between numbers of different prompts."""
    save_run(spec())
    save_run(spec(**other, **LATER))
    page = open_page("compare", run_a="01JA", run_b="01JB")
    shown = html(page)
    import re

    print(re.sub("<[^>]*>", " ", shown)[:1500])

    assert "These two can&#x27;t be compared" in shown
    assert why in shown
    assert "not comparable" in shown
    assert "clearly" not in shown.replace("clearly worse in B", "")
    assert "there is no prompt that both measured" in shown


def test_too_few_prompts(save_run: SaveRun) -> None:
    """Catches a mark that rests on four prompts."""
    save_run(spec(num_prompts=4))
    save_run(spec(num_prompts=4, drift=1.5, **LATER))
    shown = html(open_page("compare", run_a="01JA", run_b="01JB"))

    assert "too few prompts to tell: 4" in shown
    assert "range +" in shown


def test_a_candidate_without_finite_values(save_run: SaveRun) -> None:
    """Catches a candidate of NaN that is called equal, or breaks the charts."""
    save_run(spec())
    bad = (replace(SMALL[0], nan_layer=0, verdict=Verdict.REGRESSION), SMALL[1])
    save_run(spec(candidates=bad, **LATER))
    page = open_page("compare", run_a="01JA", run_b="01JB", candidate_a="int8", candidate_b="int8")

    shown = html(page)
    import re

    print(re.sub("<[^>]*>", " ", shown)[:1500])
    assert "B is clearly worse: Top-1 agreement" in shown
    assert "are finite in one only" in shown
    assert "× nan" not in shown
    assert len(figures(page)) >= 2


def test_an_empty_address_shows_the_newest_against_what_came_before(save_run: SaveRun) -> None:
    """Catches a page that is empty until one has picked everything."""
    save_run(spec())
    save_run(spec(**LATER))
    page = open_page("compare")

    assert (page.query_params["run_a"], page.query_params["run_b"]) == ("01JA", "01JB")


def test_a_run_that_measured_nothing(save_run: SaveRun, end_run: Callable[..., None]) -> None:
    """Catches a traceback for a link to a run that failed."""
    save_run(spec())
    end_run(Spec(run_id="01JX"), RunStatus.FAILED, "not enough memory")

    assert "measured no candidate" in html(open_page("compare", run_b="01JX"))


def test_the_larger_noise_floor_counts() -> None:
    """Catches a difference that one run's noise explains, told by the other run's floor."""
    a = {("logit_kl", "model"): 2e-3, ("lens_kl", "layers.0"): 1e-4}
    b = {("logit_kl", "model"): 1e-3, ("nll_difference", "model"): 1e-5}
    larger = compare_queries.larger(a, b)
    assert larger == {**b, **a}
    assert compare_queries.larger(b, a) == larger
