"""A check in service whose runs say what they are told to, on both databases."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from quantwatch.config.schema import CheckConfig, Config
from quantwatch.domain import (
    MODEL,
    Alert,
    CandidateResult,
    Culprit,
    RuleOutcome,
    RunResult,
    RunStatus,
    Scope,
    Severity,
    Verdict,
)
from quantwatch.pipeline.alerting import settler, watch
from quantwatch.store import clock, confirmations, episodes, lookups, queue, runs
from quantwatch.store.session import Database
from quantwatch.store.tables import CheckRow, DeliveryRow, EventRow, RunRow

CHECK: dict[str, Any] = {
    "reference": {"model": "smollm2-135m"},
    "candidates": [{"name": name, "model": "smollm2-135m"} for name in ("int8", "int4")],
    "suite": "core-v1:demo",
    "schedule": {"cron": "0 2 * * *"},
}
ENDPOINTS: dict[str, Any] = {
    "ops": {"url": "https://ops.example/hook"},
    "pager": {"url": "https://pager.example/hook", "severities": ["critical"]},
}
CONFIG = {"schema_version": 1, "service": {"dashboard_url": "https://watch.example/"}}
Say = Callable[..., RuleOutcome]


def say(what: str, rule: str = "layer-kl", **fields: Any) -> RuleOutcome:
    """One rule's outcome; by default a critical breach that fires at once."""
    value = {"breach": 0.2, "between": 0.09, "clear": 0.01}.get(what)
    given: dict[str, Any] = {
        "rule": rule, "candidate": "int8", "rule_sha": "v1", "severity": Severity.CRITICAL,
        "outcome": what, "enter_runs": 1, "leave_runs": 2, "scope": MODEL, "value": value,
        "value_kind": "missing" if value is None else "finite", "threshold": 0.1,
        "words": f"Output KL {value} at model is above the limit 0.1",
    }  # fmt: skip
    return RuleOutcome(**(given | fields))


@dataclass
class Service:
    """One check, its configuration, and what was told about it."""

    db: Database
    alerting: dict[str, Any] = field(default_factory=lambda: {"confirm": False})
    endpoints: dict[str, Any] = field(default_factory=lambda: dict(ENDPOINTS))
    check: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> CheckConfig:
        return CheckConfig.model_validate({**CHECK, "alerting": self.alerting, **self.check})

    @property
    def config(self) -> Config:
        checks = {"nightly": {**CHECK, "alerting": self.alerting, **self.check}}
        return Config.model_validate({**CONFIG, "checks": checks, "endpoints": self.endpoints})

    def apply(self) -> None:
        with self.db.writer() as session:
            lookups.check_id(session, "nightly")
            values = {
                "applied_at": clock.now(session),
                "config": self.settings.model_dump(mode="json"),
            }
            session.execute(update(CheckRow).values(**values))

    def queue(self, **fields: Any) -> str:
        with self.db.writer() as session:
            number = session.scalar(select(RunRow.id).order_by(RunRow.id.desc()).limit(1)) or "0"
            new = {"slot_key": f"m:after {number}", "trigger": "manual", **fields}
            config = self.settings.model_dump(mode="json")
            run_id = queue.enqueue(
                session, queue.NewRun("nightly", config=config, base_dir="/etc", **new)
            )
        assert run_id is not None
        return run_id

    def result(self, run_id: str, *outcomes: RuleOutcome, **fields: Any) -> RunResult:
        """A succeeded run; a breach has one scope, or as many as its `scopes` says."""
        with self.db.reader() as session:
            now = clock.now(session)
        names = [candidate["name"] for candidate in CHECK["candidates"]]
        breaches = [one for one in outcomes if one.outcome == "breach"]
        result = RunResult(
            run_id=run_id, check="nightly", status=RunStatus.SUCCEEDED,
            verdict=Verdict.REGRESSION if breaches else Verdict.PASS, started_at=now,
            finished_at=now, suite_name="tiny", suite_hash="h", num_tokens=8, num_prompts=2,
            reference=None, capture_sha="c", metrics_version=1, environment={"torch": "2.13"},
            config=self.settings.model_dump(mode="json"),
            candidates=tuple(candidate(name) for name in names),
            alerts=tuple(alert(one) for one in breaches), outcomes=tuple(outcomes),
        )  # fmt: skip
        for name, value in fields.items():
            object.__setattr__(result, name, value)
        return result

    def finish(self, result: RunResult) -> str:
        runs.finish_run(self.db, result, None, (), then=settler(self.settings, self.config))
        return result.run_id

    def run(self, *outcomes: RuleOutcome, **fields: Any) -> str:
        """Queue and finish a run, a minute after the one before."""
        self.db.clock_shift += timedelta(minutes=1)
        return self.finish(self.result(self.queue(), *outcomes, **fields))

    def confirm(self, parent: str, *outcomes: RuleOutcome) -> str:
        """Finish the confirmation run that was queued for a run."""
        self.db.clock_shift += timedelta(minutes=1)
        return self.finish(self.result(self.confirmation(parent) or "none queued", *outcomes))

    def confirmation(self, parent: str) -> str | None:
        query = select(RunRow.id).where(
            RunRow.parent_run_id == parent, RunRow.trigger == confirmations.TRIGGER
        )
        with self.db.reader() as session:
            return session.scalar(query)

    def end(self, run_id: str, status: str) -> None:
        with self.db.writer() as session:
            values = {"status": status, "reason_code": "oom", "reason_text": "out of memory"}
            session.execute(update(RunRow).where(RunRow.id == run_id).values(**values))

    def change_check(self, **values: Any) -> None:
        with self.db.writer() as session:
            session.execute(update(CheckRow).values(**values))

    def watch(self, after: timedelta = timedelta(minutes=1)) -> int:
        self.db.clock_shift += after
        return watch(self.db, self.config)

    def alert(self, rule: str = "layer-kl", candidate: str = "int8") -> episodes.StoredAlert:
        with self.db.reader() as session:
            found = episodes.all_alerts(session)
        return next(one for one in found if (one.rule, one.candidate) == (rule, candidate))

    def state(self, rule: str = "layer-kl", candidate: str = "int8") -> str:
        return self.alert(rule, candidate).state

    def heard(self, endpoint: str = "ops") -> list[tuple[str, str]]:
        """Type and reason of each message for an endpoint, in order, suppressed ones as well."""
        return [(body["type"], body["data"]["reason"]) for body in self.bodies(endpoint)]

    def bodies(self, endpoint: str = "ops") -> list[dict[str, Any]]:
        query = (
            select(EventRow.body)
            .join(DeliveryRow, DeliveryRow.event_id == EventRow.id)
            .where(DeliveryRow.endpoint == endpoint)
            .order_by(DeliveryRow.id)
        )
        with self.db.reader() as session:
            return [json.loads(body) for body in session.scalars(query)]


def candidate(name: str) -> CandidateResult:
    culprit = Culprit(Scope("layers.3"), 0.4, Scope("layers.3"), "layers.3 stands out")
    driver = {"name": "environment.gpus.0.driver", "value": "575.1", "baseline": "570.2"}
    changed = ({**driver, "part": "driver"},)
    return CandidateResult(name, None, Verdict.PASS, culprit=culprit, baseline_differences=changed)


def alert(outcome: RuleOutcome) -> Alert:
    return Alert(
        rule=outcome.rule, candidate=outcome.candidate, metric="lens_kl", statistic="mean",
        scope=outcome.scope or MODEL, value=outcome.value, value_kind=outcome.value_kind,
        threshold=outcome.threshold or 0.0, severity=outcome.severity, words=outcome.words,
    )  # fmt: skip


@pytest.fixture
def service(db: Database) -> Service:
    found = Service(db)
    found.apply()
    return found


@pytest.fixture(name="say")
def _say() -> Say:
    return say


@pytest.fixture(name="make_alert")
def _make_alert() -> Callable[[RuleOutcome], Alert]:
    return alert


@pytest.fixture
def make_service() -> Callable[[Database, dict[str, Any]], Service]:
    def make(database: Database, alerting: dict[str, Any]) -> Service:
        found = Service(database, alerting)
        found.apply()
        return found

    return make
