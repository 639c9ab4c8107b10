"""Which run a run is compared with, on both databases: never one that measured something else."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update

from quantwatch.baselines.comparable import mismatches
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import (
    MODEL,
    Alert,
    Block,
    CandidateResult,
    RunResult,
    RunStatus,
    Severity,
    Verdict,
)
from quantwatch.errors import UserError
from quantwatch.pipeline.against import choose_baseline, confirmed
from quantwatch.store import baselines, runs
from quantwatch.store.queue import NewRun, enqueue
from quantwatch.store.session import Database
from quantwatch.store.tables import AuditRow, RunRow

Make = Callable[..., RunResult]
Save = Callable[..., RunResult]


@pytest.fixture
def make(run: Make, row: Callable[..., Any], variant: Any) -> Make:
    """A run of day `day` with an output KL; ids sort by day."""

    def make_one(day: int, kl: float | None = 0.01, **changes: Any) -> RunResult:
        begun = datetime.fromisoformat("2026-11-01T02:00:00+00:00") + timedelta(days=day)
        bad = {"n_nan": 3} if kl is None else {}
        finite = 0.0 if kl is None else kl
        result = CandidateResult(
            "int8", variant("int8"), Verdict.PASS, (row("logit_kl", "model", finite, **bad),)
        )
        made = run(
            run_id=f"01RUN{day:03}", started_at=begun, finished_at=begun, alerts=(),
            candidates=(result,), verdict=Verdict.PASS, noise_floor={},
            config={"candidates": [{"name": "int8"}]},
        )  # fmt: skip
        return replace(made, **changes)

    return make_one


@pytest.fixture
def save(db: Database, make: Make) -> Save:
    def save_one(day: int, kl: float | None = 0.01, **changes: Any) -> RunResult:
        result = make(day, kl, **changes)
        runs.begin_run(
            db, run_id=result.run_id, check=result.check, config=result.config,
            started_at=result.started_at,
        )  # fmt: skip
        values = np.full((result.num_prompts, 1, 4), 0.01 if kl is None else kl)
        runs.finish_run(
            db, result, None, [Block("int8", "per_prompt", "logit_kl", None, (MODEL,), values)]
        )
        return result

    return save_one


def check(*names: str, **baseline: Any) -> CheckConfig:
    """A check of these candidates, int8 alone if none is given."""
    candidates = [{"name": name, "model": "hf:m"} for name in names or ("int8",)]
    known = {"reference": {"model": "hf:m"}, "suite": "core-v1"}
    return CheckConfig.model_validate(
        {**known, "candidates": candidates, "baseline": baseline or {"kind": "pinned"}}
    )


ROLLING = check(kind="rolling", window=3)
BEST = check(kind="best-ever")


def chosen(db: Database, run: RunResult, config: CheckConfig) -> tuple[str, ...]:
    found = choose_baseline(db, run, config)
    return () if found is None else found.run_ids


def test_pinned_is_what_was_pinned_and_nothing_else(db: Database, save: Save, make: Make) -> None:
    """Catches the newest run taken where nobody pinned one."""
    for day in (1, 2):
        save(day)
    assert chosen(db, make(9), check()) == ()
    baselines.pin(db, "nightly", "01RUN001", actor="ada")
    assert chosen(db, make(9), check()) == ("01RUN001",)


def test_rolling_is_the_last_good_comparable_runs(db: Database, save: Save, make: Make) -> None:
    """Catches a regression that becomes its own baseline (typo#83's feedback loop)."""
    for day, kl in enumerate((0.1, 0.2, 0.3, 0.4)):
        save(day, kl)
    save(4, 9.0, verdict=Verdict.REGRESSION)
    save(5, 0.6, suite_hash="6" * 64)
    save(6, 0.7, verdict=Verdict.WARN)
    assert chosen(db, make(9), ROLLING) == ("01RUN006", "01RUN003", "01RUN002")
    found = choose_baseline(db, make(9), ROLLING)
    assert found is not None
    assert found.run.candidates[0].measurements[0].mean == pytest.approx((0.7 + 0.4 + 0.3) / 3)
    sums = found.blocks("int8", "logit_kl")
    assert sums is not None
    assert [float(values[0, 0, 0]) for values in sums[1]] == pytest.approx([0.7, 0.4, 0.3])


def breach(rule: str, kind: str = "finite") -> Alert:
    value = 0.5 if kind == "finite" else None
    return Alert(
        rule, "int8", "logit_kl", "mean", MODEL, value, kind, 0.4, Severity.WARNING, "words"
    )  # fmt: skip


def test_what_became_worse_is_not_averaged_in_whatever_its_severity(
    db: Database, save: Save, make: Make
) -> None:
    """Catches a warning that a rolling baseline absorbs: it resolves with the fault still there."""
    for day in (0, 1):
        save(day)
    for day in (2, 3, 4):
        alerts = (breach("baseline-isolated-error"),)
        save(day, 0.5, verdict=Verdict.WARN, alerts=alerts)
    assert chosen(db, make(9), ROLLING) == ("01RUN001", "01RUN000")


STANDING = [
    ("an absolute rule", "layer-kl", "finite"),
    ("a rule that can't tell", "baseline-kl", "inconclusive"),
]


@pytest.mark.parametrize(("rule", "kind"), [s[1:] for s in STANDING], ids=[s[0] for s in STANDING])
def test_what_was_there_all_along_is_no_reason(
    db: Database, save: Save, make: Make, rule: str, kind: str
) -> None:
    """Catches a check that never has a baseline since one rule has warned from the first run on."""
    for day in (0, 1):
        save(day, verdict=Verdict.WARN, alerts=(breach(rule, kind),))
    assert chosen(db, make(9), ROLLING) == ("01RUN001", "01RUN000")


@pytest.mark.parametrize("config", [ROLLING, BEST], ids=["rolling", "best-ever"])
def test_a_confirmation_is_not_compared_with_its_own_night(
    db: Database, save: Save, make: Make, config: CheckConfig
) -> None:
    """Catches a run compared with the one that it is pooled with, or that confirms the same."""
    save(1, 0.3)
    save(2, 0.2)
    ids = []
    for number in (1, 2):
        new = NewRun(
            "nightly", f"c:01RUN002:{number}", {}, "/", "confirm", parent_run_id="01RUN002"
        )
        with db.writer() as session:
            ids.append(enqueue(session, new))
    sibling = make(3, 0.1, run_id=ids[0])
    with db.writer() as session:
        session.execute(
            update(RunRow).where(RunRow.id == ids[0]).values(status="measuring", lease_token=None)
        )
    values = np.full((sibling.num_prompts, 1, 4), 0.1)
    block = Block("int8", "per_prompt", "logit_kl", None, (MODEL,), values)
    runs.finish_run(db, sibling, None, [block])
    assert chosen(db, make(4, run_id=ids[1]), config) == ("01RUN001",)
    assert ids[0] in chosen(db, make(9), config)


def test_a_run_is_never_its_own_baseline_nor_a_later_one(
    db: Database, save: Save, make: Make
) -> None:
    """Catches a difference of exactly 0 that proves nothing."""
    for day in (1, 2, 3):
        save(day)
    assert chosen(db, make(2), ROLLING) == ("01RUN001",)
    assert chosen(db, make(2, 0.5), BEST) == ("01RUN001",)


def test_best_ever_has_the_lowest_output_kl(db: Database, save: Save, make: Make) -> None:
    """Catches the highest, the newest, and a mean that skips NaN."""
    for day, kl in enumerate((0.3, 0.1, None, 0.1, 0.2)):
        save(day, kl)
    save(5, 0.001, capture_sha="d" * 64)
    assert chosen(db, make(9), BEST) == ("01RUN001",)


def test_the_best_says_of_how_many(db: Database, save: Save, make: Make) -> None:
    """Catches the luckiest of many nights taken for what a night is like."""
    for day, kl in enumerate((0.3, 0.1, None, 0.2)):
        save(day, kl)
    baselines.pin(db, "nightly", "01RUN000")
    found = [choose_baseline(db, make(9), each) for each in (BEST, ROLLING, check())]
    assert [each and each.chosen_from for each in found] == [3, 1, 1]


def test_best_ever_needs_every_candidate(db: Database, save: Save, make: Make) -> None:
    """Catches a run that is best because its worst candidate failed to load."""
    save(0, 0.1)
    assert chosen(db, make(9), check("int8", "int4", kind="best-ever")) == ()


DIGESTS = [
    ("suite_hash", {"suite_hash": "6" * 64}),
    ("capture_sha", {"capture_sha": "d" * 64}),
    ("metrics_version", {"metrics_version": 2}),
]


@pytest.mark.parametrize("config", [ROLLING, BEST], ids=["rolling", "best-ever"])
@pytest.mark.parametrize("changes", [d[1] for d in DIGESTS], ids=[d[0] for d in DIGESTS])
def test_what_measured_something_else_is_not_chosen(
    db: Database, save: Save, make: Make, config: CheckConfig, changes: dict[str, Any]
) -> None:
    """Catches a silent comparison; the same words as `mismatches`, or they drift apart."""
    other = save(1, 0.001, **changes)
    now = make(9)
    assert mismatches(now, other)
    assert chosen(db, now, config) == ()


@pytest.mark.parametrize("config", [ROLLING, BEST], ids=["rolling", "best-ever"])
def test_another_reference_is_not_chosen(
    db: Database, save: Save, make: Make, variant: Any, config: CheckConfig
) -> None:
    """Catches a reference that moved, told as a regression (N8)."""
    save(1)
    assert chosen(db, make(9, reference=variant("another")), config) == ()


def test_a_failed_run_is_no_baseline(db: Database, make: Make) -> None:
    """Catches a run without results in a rolling window."""
    failed = make(1)
    runs.begin_run(
        db, run_id=failed.run_id, check="nightly", config={}, started_at=failed.started_at
    )
    runs.end_run(db, failed.run_id, RunStatus.FAILED, "no memory")
    assert chosen(db, make(9), ROLLING) == ()
    with pytest.raises(UserError, match="is failed"):
        baselines.pin(db, "nightly", failed.run_id)


def test_pinning_is_audited(db: Database, save: Save) -> None:
    """Catches a promotion of which nobody knows who made it (F23)."""
    for day in (1, 2):
        save(day)
    baselines.pin(db, "nightly", "01RUN001", actor="ada")
    baselines.pin(db, "nightly", "01RUN002", actor="bob")
    found = baselines.get_pin(db, "nightly")
    assert found is not None
    assert (found.run_id, found.by) == ("01RUN002", "bob")
    (standing,) = baselines.standings(db)
    assert (standing.kind, standing.run_id, standing.by) == ("pinned", "01RUN002", "bob")
    assert standing.since == found.since
    baselines.unpin(db, "nightly", actor="cy")
    with db.reader() as session:
        rows = session.execute(
            select(AuditRow.actor, AuditRow.action, AuditRow.before, AuditRow.after)
            .where(AuditRow.subject == "check nightly")
            .order_by(AuditRow.id)
        ).all()
    assert [tuple(each) for each in rows] == [
        ("ada", "baseline.pin", None, {"run": "01RUN001"}),
        ("bob", "baseline.pin", {"run": "01RUN001"}, {"run": "01RUN002"}),
        ("cy", "baseline.unpin", {"run": "01RUN002"}, None),
    ]
    assert baselines.standings(db)[0].run_id is None


def test_a_pin_that_fails_is_not_audited(db: Database, save: Save) -> None:
    """Catches an audit row of something that did not happen."""
    save(1)
    with pytest.raises(UserError):
        baselines.pin(db, "other", "01RUN001", actor="ada")
    with db.reader() as session:
        assert session.execute(select(AuditRow)).all() == []


def test_a_confirmation_run_finds_what_it_confirms(db: Database, save: Save, make: Make) -> None:
    """Catches a confirmation that is pooled with nothing, or with a run of other prompts."""
    first = save(1, 0.5)
    new = NewRun("nightly", "c:01RUN001:1", {}, "/", "confirm", parent_run_id=first.run_id)
    with db.writer() as session:
        run_id = enqueue(session, new)
    second = make(2, run_id=run_id)
    found = confirmed(db, second)
    assert found is not None
    assert found[0].run_id == first.run_id
    assert found[1]("int8", "logit_kl") is not None
    assert confirmed(db, replace(second, suite_hash="6" * 64)) is None
    assert confirmed(db, first) is None
    with db.reader() as session:
        assert session.get(RunRow, first.run_id).parent_run_id is None  # type: ignore[union-attr]
