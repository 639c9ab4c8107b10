"""Attributions come back as they were written, on both databases, and go with their run."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import delete, func, select

from quantwatch.domain import (
    AttributedPart,
    Attribution,
    Restoration,
    RunResult,
    Scope,
    Verdict,
)
from quantwatch.errors import NotFoundError
from quantwatch.store.attributions import attributions_of, save_attribution
from quantwatch.store.session import Database
from quantwatch.store.tables import AttributionPartRow, AttributionRow, RunRow

Save = Callable[..., RunResult]
PARTS = (
    AttributedPart(Scope("embedding"), "embedding", True, 0.0, 0.0, 0.0),
    AttributedPart(Scope("layers.0"), "layer", True, 0.125, 0.0625, 0.01),
    AttributedPart(Scope("layers.0.attention"), "attention", False, 1e-12, 0.03125, None),
    AttributedPart(Scope("layers.1"), "layer", True, 0.25, 0.5, 0.03),
)
FOUND = Attribution(
    candidate="int4", made_at=datetime(2026, 11, 30, 9, 30, tzinfo=UTC), detail="part",
    seed=3, num_prompts=2, num_tokens=400, num_scored=380, kl=0.5, together_kl=0.49,
    num_boundaries=4, parts=PARTS, notes=("a note",),
)  # fmt: skip
RESTORED = Restoration(
    (Scope("layers.1"),), Verdict.PASS, 0.01, 5, True, "1 of 2 layers", {"weights": "int4"}
)


@pytest.mark.parametrize("restoration", [None, RESTORED, replace(RESTORED, verdict=None, kl=None)])
def test_round_trip(db: Database, save: Save, restoration: Any) -> None:
    """Catches a field that is lost, and parts in another order."""
    run_id = save().run_id
    written = replace(FOUND, restoration=restoration)
    save_attribution(db, run_id, written)
    assert attributions_of(db, run_id) == [written]


def test_the_newest_takes_the_place_of_the_last(db: Database, save: Save) -> None:
    """Catches parts of two attributions mixed, and another candidate's that is lost."""
    run_id = save().run_id
    other = replace(FOUND, candidate="int8")
    newer = replace(FOUND, kl=0.25, parts=PARTS[1:2])
    for each in (FOUND, other, newer):
        save_attribution(db, run_id, each)
    assert attributions_of(db, run_id) == [other, newer]


def test_it_goes_with_its_run(db: Database, save: Save) -> None:
    """Catches rows that nobody deletes, and a run that can't be deleted any more."""
    run_id, kept = save().run_id, save(days=1).run_id
    for each in (run_id, kept):
        save_attribution(db, each, FOUND)
    with db.writer() as session:
        session.execute(delete(RunRow).where(RunRow.id == run_id))
    assert attributions_of(db, run_id) == []
    assert attributions_of(db, kept) == [FOUND]
    with db.reader() as session:
        assert session.scalar(select(func.count()).select_from(AttributionRow)) == 1
        assert session.scalar(select(func.count()).select_from(AttributionPartRow)) == len(PARTS)


def test_nothing_and_nobody(db: Database, save: Save) -> None:
    """Catches an empty state that is an error, and a misspelled candidate that is stored."""
    run_id = save().run_id
    assert attributions_of(db, run_id) == []
    with pytest.raises(NotFoundError, match="no candidate 'int5' of run"):
        save_attribution(db, run_id, replace(FOUND, candidate="int5"))


def test_figures_that_follow() -> None:
    """Catches parts of a layer that are counted twice, and a division by 0."""
    assert FOUND.additivity == 0.75
    assert [FOUND.share(part) for part in FOUND.ranked] == [0.5, 0.25, 2e-12, 0.0]
    assert [part.direction for part in PARTS] == [None, 2.0, 1e-12 / 0.03125, 0.5]
    equal = replace(FOUND, kl=0.0)
    assert equal.additivity is None
    assert equal.share(PARTS[0]) is None
