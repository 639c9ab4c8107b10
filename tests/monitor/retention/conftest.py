"""Small real runs of any age, with matrices, to be thinned and deleted."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, select, text

from quantwatch.config.service import RetentionConfig
from quantwatch.domain import (
    MODEL,
    Alert,
    Block,
    CandidateResult,
    Fingerprint,
    Measurement,
    Prompt,
    RunResult,
    RunStatus,
    Scope,
    Severity,
    Suite,
    Variant,
    Verdict,
)
from quantwatch.store.runs import begin_run, finish_run
from quantwatch.store.session import Database
from quantwatch.store.tables import (
    Base,
    BlockRow,
    MeasurementRow,
    RunCandidateRow,
    RunRow,
    ScopeRow,
)
from quantwatch.telemetry import canonical_sha, new_run_id

NUM_PROMPTS = 3
LAYERS = (Scope("layers.0"), Scope("layers.1"))


@pytest.fixture
def config() -> RetentionConfig:
    """Short limits: 2 runs with tokens, 10 days of prompt sums, a month, a year."""
    return RetentionConfig(
        token_runs=2, flagged="20d", prompts="10d", statistics="30d", runs="360d", logs="60d"
    )


@dataclass
class Stored:
    """Makes runs and says what is left of them."""

    db: Database

    def add(
        self, days: float, *, check: str = "nightly", tokenizer: str = "t", **fields: Any
    ) -> str:
        """Store a run that began `days` ago; `flagged` gives it an alert. Returns its id."""
        flagged = fields.pop("flagged", False)
        result = _result(days, check, tokenizer, flagged, fields)
        suite = _suite(result.suite_name)
        begin_run(
            self.db, run_id=result.run_id, check=check, config={}, started_at=result.started_at
        )
        finish_run(self.db, result, suite, _blocks())
        return result.run_id

    def nightly(self, days: range, **fields: Any) -> list[str]:
        """Store one run a day; returns their ids by age, youngest first."""
        return [self.add(day, **fields) for day in sorted(days, reverse=True)][::-1]

    def tiers(self, run_id: str) -> str:
        """Return which tiers of a run are there: `T` tokens, `P` prompts, `L` layers, `R` run."""
        with self.db.reader() as session:
            kinds = set(
                session.scalars(
                    select(BlockRow.kind)
                    .join(RunCandidateRow, RunCandidateRow.id == BlockRow.run_candidate_id)
                    .where(RunCandidateRow.run_id == run_id)
                )
            )
            layers = session.scalar(
                select(func.count())
                .select_from(MeasurementRow)
                .join(RunCandidateRow, RunCandidateRow.id == MeasurementRow.run_candidate_id)
                .join(ScopeRow, ScopeRow.id == MeasurementRow.scope_id)
                .where(RunCandidateRow.run_id == run_id, ScopeRow.name != MODEL)
            )
            there = session.get(RunRow, run_id) is not None
        has_tokens, has_prompts = {"per_token", "topk"} <= kinds, "per_prompt" in kinds
        found = zip("TPLR", (has_tokens, has_prompts, bool(layers), there), strict=True)
        return "".join(letter for letter, is_there in found if is_there)

    def counts(self) -> dict[str, int]:
        """Return the number of rows of every table."""
        with self.db.reader() as session:
            return {
                table.name: session.scalar(select(func.count()).select_from(table)) or 0
                for table in Base.metadata.sorted_tables
            }

    def broken_references(self) -> list[Any]:
        """Return what SQLite's foreign_key_check finds; PostgreSQL can't hold any."""
        if self.db.engine.dialect.name != "sqlite":
            return []
        with self.db.reader() as session:
            return list(session.execute(text("PRAGMA foreign_key_check")))


@pytest.fixture
def stored(db: Database) -> Stored:
    return Stored(db)


def _suite(name: str) -> Suite:
    ids = tuple((1, 5 + i, 9) for i in range(NUM_PROMPTS))
    prompts = tuple(
        Prompt(i, "prose", "file.txt", ids[i], ("a", "b", "c")) for i in range(NUM_PROMPTS)
    )
    return Suite(name, canonical_sha([name, ids]), prompts, vocabulary=("a", "b", "c"))


def _result(
    days: float, check: str, tokenizer: str, flagged: bool, fields: dict[str, Any]
) -> RunResult:
    started = datetime.now(UTC) - timedelta(days=days)
    name = fields.pop("suite_name", "tiny")
    values: dict[str, Any] = {
        "run_id": new_run_id(),
        "check": check,
        "status": RunStatus.SUCCEEDED,
        "verdict": Verdict.WARN if flagged else Verdict.PASS,
        "started_at": started,
        "finished_at": started + timedelta(minutes=3),
        "suite_name": name,
        "suite_hash": _suite(name).hash,
        "num_tokens": 9,
        "num_prompts": NUM_PROMPTS,
        "reference": _variant("reference", tokenizer),
        "capture_sha": "c" * 64,
        "metrics_version": 1,
        "environment": {"torch": "2.13"},
        "config": {},
        "candidates": (_candidate(tokenizer),),
        "alerts": (_alert(),) if flagged else (),
        "noise_floor": {("logit_kl", "model"): 1e-6, ("lens_kl", "layers.0"): 1e-6},
    }
    return RunResult(**values | fields)


def _blocks() -> tuple[Block, ...]:
    rng = np.random.default_rng(7)
    tokens = tuple(
        Block("int8", "per_token", "lens_kl", i, LAYERS, rng.lognormal(size=(2, 3)))
        for i in range(NUM_PROMPTS)
    )
    tops = tuple(
        Block(
            "int8", "topk", "logits", i, (MODEL,), rng.integers(0, 99, (5, 3, 2)).astype(np.float64)
        )
        for i in range(NUM_PROMPTS)
    )
    sums = Block("int8", "per_prompt", "lens_kl", None, LAYERS, rng.normal(size=(3, 2, 4)))
    return (*tokens, *tops, sums)


def _variant(name: str, tokenizer: str) -> Variant:
    fingerprint = Fingerprint(
        canonical_sha([name, tokenizer]), "b" * 64, canonical_sha(tokenizer), "", "", ""
    )
    return Variant(name, fingerprint, "float32", 538_000_000, 32.0, {"path": "/models/smol"})


def _candidate(tokenizer: str) -> CandidateResult:
    measured = (("logit_kl", MODEL), *(("lens_kl", scope) for scope in LAYERS))
    return CandidateResult(
        name="int8",
        variant=_variant("int8", tokenizer),
        verdict=Verdict.PASS,
        measurements=tuple(_measurement(metric, scope) for metric, scope in measured),
    )


def _measurement(metric: str, scope: str) -> Measurement:
    return Measurement(
        metric=metric, scope=Scope(scope), n=9, n_nan=0, n_posinf=0, n_neginf=0, n_missing=0,
        mean=0.01, std=0.003, se=0.001, min=0.0, p50=0.01, p90=0.01, p95=0.01, p99=0.01,
        p999=0.01, max=0.02, max_prompt=1, max_position=2, method="all positions",
    )  # fmt: skip


def _alert() -> Alert:
    return Alert(
        rule="kl", candidate="int8", metric="lens_kl", statistic="mean", scope=Scope("layers.1"),
        value=0.2, value_kind="finite", threshold=0.15, severity=Severity.WARNING,
        words="KL 0.2 > 0.15",
    )  # fmt: skip
