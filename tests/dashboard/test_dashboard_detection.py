"""Detection power on the Check page and canaries on Operations, and what stands there without any."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from tests.dashboard.invented import Spec
from tests.dashboard.pages import fresh_page, html

from quantwatch.domain import Canary, Detectable, RunResult, Scope
from quantwatch.store.canaries import Flown, save_canary
from quantwatch.store.session import open_database
from quantwatch.store.tables import DetectableRow
from quantwatch_dashboard.components.detection import changes, flights

CANARY = Canary(
    "int8", "candidate", 0, "channel", 0.01, Scope("layers.1.mlp.up_proj"), 17,
    datetime(2026, 11, 30, 2, 10, tzinfo=UTC), 4.5, "measured", True, True, Scope("layers.1"),
    "isolated-error-outlier", Scope("layers.1"), 0.02, 0.01,
)  # fmt: skip
MISSED = replace(CANARY, found=False, located=False, named=None, rule=None, scope=None, value=None,
                 threshold=None, reason="isolated error at <b>: 0.01 → 0.0101")  # fmt: skip
FOUND = Detectable("kl", "logit_kl", "mean", Scope("model"), 1, 0.01, 0.02, 0.0125, 0.8)
NEVER = Detectable(
    "top1", "top1_agreement", "p99", None, 0, None, None, None, 0.8, "<i>few prompts"
)


def test_changes() -> None:
    """Catches an effect in another column, and a rule that finds nothing shown as one that does."""
    shown = changes([("int4", (FOUND, NEVER))], ["int8", "int4"])
    first, second = shown.split("<tr>")[2:]
    assert first.index("0.0125") < first.index("0.0100") < first.index("0.0200")
    assert "Output KL" in first
    assert "none is found" in second
    assert "&lt;i&gt;few prompts" in second
    assert "none is found" not in first
    derived = changes([("int4", (replace(FOUND, metric="ppl_ratio"),))], ["int4"])
    assert "Perplexity ratio" in derived


@pytest.mark.parametrize(
    ("canary", "said"),
    [
        (CANARY, "found and located"),
        (replace(CANARY, located=False), "found, not located"),
        (MISSED, "not found"),
        (replace(MISSED, state="not measurable", found=None, located=None), "not measurable"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_flights(canary: Canary, said: str) -> None:
    """Catches a canary that was missed and looks well, and words that are markup."""
    shown = flights([Flown("nightly", "RUN1", canary)], UTC, with_check=True)
    assert f">{said}<" in shown
    assert ("qw-hot" in shown) == (said in ("not found", "found, not located"))
    assert "<b>:" not in shown
    assert "channel 17 at layers.1.mlp.up_proj in a copy of int8" in shown
    assert "check=nightly" in shown


@pytest.mark.slow
def test_on_the_pages(empty_url: str, save_run: Callable[[Spec], RunResult]) -> None:
    """Catches sections without data that are errors, and ones that stay empty with data."""
    run = save_run(Spec())
    shown = html(fresh_page("check", check=run.check))
    assert "This check has no canary" in shown
    assert "What would have been found" not in shown
    database = open_database(empty_url)
    with database.writer() as session:
        save_canary(session, run.run_id, MISSED)
        session.add(
            DetectableRow(
                run_candidate_id=1, idx=0, rule="kl", metric="logit_kl", statistic="mean",
                scope="model", num_scopes=1, expected=0.01, limit=0.02, value=0.0125, power=0.8,
                reason="",
            )
        )  # fmt: skip
    database.close()
    shown = html(fresh_page("check", check=run.check))
    assert "found by a rule" not in shown
    assert ">not found<" in shown
    assert "80% of nights" in shown
    assert "0.0125" in shown
    assert ">not found<" in html(fresh_page("operations"))
