"""Attribution on the run page: shares as they are stored, and the command where there are none."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from tests.dashboard.invented import Spec
from tests.dashboard.pages import fresh_page, html

from quantwatch.domain import (
    AttributedPart,
    Attribution,
    Restoration,
    RunResult,
    Scope,
    Verdict,
)
from quantwatch.store.attributions import save_attribution
from quantwatch.store.session import open_database
from quantwatch_dashboard.components.attribution import facts, shares

PARTS = (
    AttributedPart(Scope("layers.0"), "layer", True, 0.1, 0.2, 0.05),
    AttributedPart(Scope("layers.1"), "layer", True, 0.3, 0.1, None),
    AttributedPart(Scope("head"), "head", True, 0.0, 0.0, 0.0),
)
FOUND = Attribution(
    "int4", datetime(2026, 11, 30, tzinfo=UTC), "layer", 3, 2, 400, 380, 0.5, 0.5, 5, PARTS
)


def test_the_costliest_come_first() -> None:
    """Catches a share of the sum instead of the whole, and parts without a ratio that are 0."""
    shown = shares(FOUND, "R", "#123456")
    assert shown.index("layers.1<") < shown.index("layers.0<") < shown.index("head<")
    rows = shown.split("<tr>")[2:]
    assert "60.0 %" in rows[0].replace("60.00", "60.0")
    assert "width: 100.00%" in rows[0]
    assert "width: 33.33%" in rows[1]
    assert "–" in rows[2]
    assert "run=R&amp;candidate=int4&amp;layer=layers.1" in shown


def test_facts_tell_the_controls() -> None:
    """Catches controls that nobody sees, and a name that is markup."""
    restored = Restoration(
        (Scope("<b>layers.1"),), Verdict.PASS, 0.1, 2, True, "1 of 3 parts restored: pass", {}
    )
    shown = facts(replace(FOUND, notes=("a <i>note",), restoration=restored), 9)
    assert "380 tokens of 2 of 9 prompts, seed 3" in shown
    assert "0.800: sum of the parts" in shown
    assert "&lt;b&gt;layers.1" in shown
    assert "a &lt;i&gt;note" in shown
    assert "1 of 3 parts restored: pass" in shown
    assert "exactly 0 at 5 boundaries" in shown
    failed = replace(restored, scopes=(), verdict=None, kl=None, words="none is enough; all 3 …")
    shown = facts(replace(FOUND, restoration=failed), 9)
    assert "<dt>To restore</dt><dd>none is enough; all 3 …</dd>" in shown
    assert "nothing (" not in shown
    nothing = facts(replace(FOUND, kl=0.0), 9)
    assert "–: sum of the parts" in nothing
    assert "To restore" not in nothing


@pytest.mark.slow
def test_on_the_run_page(empty_url: str, save_run: Callable[[Spec], RunResult]) -> None:
    """Catches an empty state without a way out of it, and one that stays when there are shares."""
    run = save_run(Spec())
    shown = html(fresh_page("run", run=run.run_id))
    assert f"attribute {run.run_id}" in shown
    name = next(c.name for c in run.candidates if c.failure is None)
    database = open_database(empty_url)
    save_attribution(database, run.run_id, replace(FOUND, candidate=name))
    database.close()
    shown = html(fresh_page("run", run=run.run_id))
    assert f"attribute {run.run_id}" not in shown
    assert "380 tokens of 2 of" in shown
