"""What `fill.py` writes beside runs: alerts and who was told, kernels, GPUs, people's decisions."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import fill_content as content
from fill_content import Plan, Story
from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from quantwatch.config.schema import CheckConfig
from quantwatch.config.service import RetentionConfig
from quantwatch.domain import MODEL
from quantwatch.domain.lifecycle import RunEvent
from quantwatch.store import (
    applied,
    checks,
    clock,
    components,
    deliveries,
    episodes,
    failed_tasks,
    figures,
    kernels,
    leader,
    leases,
    outbox,
    queue,
    schedules,
    silences,
)
from quantwatch.store.attempts import WorkerId
from quantwatch.store.episodes import Episode
from quantwatch.store.session import Database
from quantwatch.store.tables import CheckRow, EpisodeRow, RuleEvaluationRow, RunCandidateRow, RunRow
from quantwatch.telemetry import canonical_sha, new_run_id

ENDPOINTS = ("slack-quality", "pagerduty", "warehouse")
_BROKEN = "warehouse"
_RULES = {
    "fault": ("isolated-error-outlier", "critical", "isolated_error", 0.024, 0.136),
    "warn": ("layer-kl", "warning", "lens_kl", 0.15, 0.19),
    "nan": ("nonfinite", "critical", "rel_error", 0.0, None),
}
_OPERATORS = ("int4_linear", "w8a8_linear", "hadamard", "quantize_rows", "paged_attention")
_BACKENDS = ("aten", "inductor", "triton")
_LEASE_S = 7 * 86400.0
_KEPT_EVALUATIONS = 60


def noise_floor(layers: int) -> dict[tuple[str, str], float]:
    """Return how far the reference seems to be from itself."""
    found = {("logit_kl", str(MODEL)): 3e-7, ("top1_agreement", str(MODEL)): 0.0}
    for i in range(layers):
        found["lens_kl", f"layers.{i}"] = 2e-7 * (1 + i / layers)
        found["rel_error", f"layers.{i}"] = 4e-6 * (1 + i / layers)
    return found


def usage(rng: random.Random, age: int) -> tuple[int, dict[str, Any]]:
    """Return peak memory and GPU telemetry of a run, as the worker keeps them."""
    load = 62 + 20 * rng.random()
    card = {
        "name": "NVIDIA L4",
        "memory_used_bytes": {"mean": 9.1e9, "min": 2.1e9, "max": 11.4e9 + 1e8 * rng.random()},
        "memory_total_bytes": {"mean": 24.2e9, "min": 24.2e9, "max": 24.2e9},
        "utilisation_percent": {"mean": load, "min": 0.0, "max": 100.0},
        "temperature_celsius": {"mean": 61.0, "min": 44.0, "max": 68.0 + 6 * rng.random()},
        "sm_clock_mhz": {"mean": 1890.0, "min": 210.0, "max": 2040.0},
        "power_watts": {"mean": 54.0, "min": 12.0, "max": 72.0},
        "ecc_uncorrected": {"during": 0.0, "total": 0.0},
        "throttle_reasons": ["power cap"] if age % 17 == 3 else [],
    }
    driver = content.environment_at(age, 365, 0)["gpus"][0]["driver"]
    return int(4.2e9 + 3e8 * rng.random()), {"driver": driver, "gpus": {"GPU-00000000": card}}


def apply_endpoints(session: Session) -> None:
    """Let the service know its receivers and settings, without secrets."""
    applied.apply_endpoints(session, {name: canonical_sha([name]) for name in ENDPOINTS})
    documents: dict[str, Any] = {f"endpoint:{name}": {"kind": "webhook"} for name in ENDPOINTS}
    documents["service"] = {"devices": ["cuda:0"], "port": 8500}
    documents["retention"] = RetentionConfig(token_runs=14, statistics="400d").model_dump(
        mode="json"
    )
    applied.apply_settings(session, documents)


def fill(
    db: Database,
    plan: Plan,
    stories: Sequence[Story],
    configs: Mapping[str, CheckConfig],
    now: datetime,
) -> None:
    """Write what follows from the nights, in the order in which it happened."""
    rng = random.Random(plan.seed + 1)
    for told in sorted(_told(plan, stories, now), key=lambda each: each.at):
        db.clock_shift = told.at - now
        with db.writer() as session:
            told.tell(session, rng)
        db.clock_shift = min(told.at + timedelta(minutes=2) - now, timedelta())
        with db.writer() as session:
            _deliver(session, rng)
    db.clock_shift = timedelta()
    with db.writer() as session:
        _evaluate(session, now)
    _schedule(db, stories, now)
    _decide(db, stories)
    _start(db, stories, configs)
    _kernels(db, now, rng)
    leader.acquire(db, "gpu-1/scheduler")
    with db.writer() as session:
        _parts(session, now)


def _evaluate(session: Session, now: datetime) -> None:
    """Judge three rules on each candidate of the newest nights."""
    rows = session.execute(
        select(RunRow.id, RunRow.check_id, RunCandidateRow.name, RunRow.started_at)
        .join(RunCandidateRow, RunCandidateRow.run_id == RunRow.id)
        .where(RunRow.started_at > now - timedelta(days=_KEPT_EVALUATIONS))
    ).all()
    keys = {(row.check_id, row.name) for row in rows}
    alerts: dict[tuple[int, str, str], int] = {}
    for check_id in sorted({check_id for check_id, _ in keys}):
        wanted = [(n, r[0]) for c, n in keys if c == check_id for r in _RULES.values()]
        for (name, rule), alert in episodes.find_alerts(session, check_id, wanted).items():
            alerts[check_id, name, rule] = alert.id
    spans = _spans(session)
    judged = [
        _evaluation(row, (alerts[row.check_id, row.name, rule[0]], *rule[3:]), spans)
        for row in rows
        for rule in _RULES.values()
    ]
    if judged:
        session.execute(insert(RuleEvaluationRow), judged)


Spans = Mapping[int, Sequence[tuple[datetime, datetime | None]]]
"""Alert → when its episodes began and ended."""


def _spans(session: Session) -> Spans:
    columns = (EpisodeRow.alert_id, EpisodeRow.opened_at, EpisodeRow.resolved_at)
    found: dict[int, list[tuple[datetime, datetime | None]]] = {}
    for alert, opened, resolved in session.execute(select(*columns)):
        found.setdefault(alert, []).append((opened, resolved))
    return found


def _evaluation(row: Any, judged: tuple[int, float, float | None], spans: Spans) -> dict[str, Any]:
    """Return what a rule said of a run: a breach as long as its episode lasts, else clear."""
    alert, limit, worse = judged
    # An episode opens minutes after the run that breached first began.
    moment = row.started_at + timedelta(minutes=10)
    breached = any(
        at <= moment and (end is None or moment < end) for at, end in spans.get(alert, ())
    )
    value = worse if breached else limit / 3
    return {
        "alert_id": alert,
        "run_id": row.id,
        "eval_version": 1,
        "outcome": "breach" if breached else "clear",
        "value": value,
        "value_kind": "nan" if value is None else "finite",
        "threshold": limit,
        "evaluated_at": row.started_at + timedelta(minutes=3),
    }


@dataclass(frozen=True, slots=True)
class Told:
    """One end of an episode: it begins to fire, or it is over."""

    at: datetime
    story: Story
    how: str
    candidate: str
    resolves: bool = False

    def tell(self, session: Session, rng: random.Random) -> None:
        """Move the alert, keep the episode, and publish the message."""
        check_id = session.scalars(
            select(CheckRow.id).where(CheckRow.name == self.story.name)
        ).one()
        rule, severity, metric, limit, value = _RULES[self.how]
        key = (self.candidate, rule)
        alert = episodes.find_alerts(session, check_id, [key])[key]
        if self.resolves:
            episode = alert.episode
            assert episode is not None
            ended = {"resolved_at": self.at, "resolve_reason": "recovered"}
            values = {name: getattr(episode, name) for name in Episode.__slots__}
            episodes.save_episode(session, Episode(**{**values, **ended}))
            episodes.move(session, alert, {"state": "inactive", "episode_id": None})
        else:
            run = _run_at(session, check_id, self.at)
            words = f"{metric}.mean at layers.14 is beyond {limit}"
            evidence = {
                "metric": metric, "statistic": "mean", "scope": "layers.14", "value": value,
                "value_kind": "nan" if value is None else "finite", "threshold": limit,
                "words": words, "scopes": [], "more_scopes": 0, "changed": [], "run": run,
            }  # fmt: skip
            episode = Episode(
                new_run_id(), alert.id, severity, self.at, self.at, None, None, run, run,
                1, value, str(evidence["value_kind"]), ENDPOINTS, None, self.at,
                None, None, None, evidence,
            )  # fmt: skip
            episodes.add_episode(session, episode)
            moved = {"state": "firing", "severity": severity, "episode_id": episode.id}
            moved |= {"num_breaches": 1, "last_run_id": run, "changed_at": self.at}
            episodes.move(session, alert, moved)
        self._publish(session, alert.id, episode.id, severity)
        if not self.resolves and rng.random() < 0.4:
            episodes.acknowledge(session, alert.id, "dana", "seen; the new kernel is rolled back")

    def _publish(self, session: Session, alert: int, episode: str, severity: str) -> None:
        kind = "alert.resolved" if self.resolves else "alert.firing"
        member = {"id": alert, "episode": episode, "rule": _RULES[self.how][0]}
        member["severity"] = severity
        data = {"check": self.story.name, "candidate": self.candidate, "alerts": [member]}
        body = {"type": kind, "timestamp": self.at.isoformat(), "data": data}
        event = outbox.Event(kind, f"{self.story.name}/{self.candidate}", body)
        outbox.publish(session, event, ENDPOINTS)


def _run_at(session: Session, check_id: int, at: datetime) -> str | None:
    query = select(RunRow.id).where(RunRow.check_id == check_id, RunRow.started_at <= at)
    return session.scalar(query.order_by(RunRow.started_at.desc()).limit(1))


def _told(plan: Plan, stories: Sequence[Story], now: datetime) -> Iterator[Told]:
    for story in stories:
        how = story.trouble if story.trouble in _RULES else None
        named = content.template(plan, story.index, how).result.candidates[-1].name
        after = timedelta(minutes=5)
        if how is not None and story.worse_since is not None:
            at = content.night_at(story, story.worse_since, now)
            yield Told(min(at + after, now), story, how, named)
        # Long ago, and over: every third check was slightly off for a week.
        if story.index % 3 == 0 and plan.nights > 60 and how != "warn":
            yield Told(content.night_at(story, 55, now) + after, story, "warn", named)
            end = content.night_at(story, 48, now) + after
            yield Told(end, story, "warn", named, resolves=True)


def _deliver(session: Session, rng: random.Random) -> None:
    """Send what is due: one receiver was down for good now and then."""
    now = clock.now(session)
    for name in ENDPOINTS:
        for due in deliveries.due(session, name, now, 20):
            message = deliveries.take(session, due, name, token=leases.new_token(), lease_s=30)
            if message is None:
                continue
            if name == _BROKEN and rng.random() < 0.5:
                failed = deliveries.Attempt(
                    "dead", now, True, 10.0, 503, "http_503", "503 Service Unavailable"
                )
                deliveries.finish(session, message, failed)
                words = "503 Service Unavailable"
                failed_tasks.note_failure(session, "delivery", "http_503", name, words)
            else:
                sent = deliveries.Attempt("delivered", now, True, 0.1 + rng.random() / 3, 200)
                deliveries.finish(session, message, sent)


def _schedule(db: Database, stories: Sequence[Story], now: datetime) -> None:
    """Let every schedule wait for tomorrow's night, as a scheduler leaves it."""
    with db.writer() as session:
        states = schedules.states_by_check(session)
        for story in stories:
            last, following = (content.night_at(story, age, now) for age in (0, -1))
            schedules.advance(session, states[story.name], last, following, following)


def _decide(db: Database, stories: Sequence[Story]) -> None:
    """Do what people did: pause, silence."""
    for story in stories:
        if story.trouble == "paused":
            checks.pause(db, story.name, "lee", "the reference is re-exported until Thursday")
    with db.writer() as session:
        matcher = {"check": f"{stories[0].name}*", "severity": "warning"}
        silences.add_silence(session, matcher, timedelta(days=2), "lee", "new calibration data")


def _start(db: Database, stories: Sequence[Story], configs: Mapping[str, CheckConfig]) -> None:
    """Let one check run at this moment, and another one wait for it."""
    for story in sorted(stories, key=lambda each: each.trouble == "queued"):
        if story.trouble not in ("running", "queued"):
            continue
        new = queue.NewRun.of(
            story.name, configs[story.name], "/srv/quantwatch", f"m:{new_run_id()}", actor="dana"
        )
        with db.writer() as session:
            queue.enqueue(session, new)
        if story.trouble == "running":
            with db.writer() as session:
                me = WorkerId("worker-1", "gpu-1", 4242)
                held = leases.claim(session, me, ["cpu"], lease_s=_LEASE_S)
            if held is not None:
                for event in (RunEvent.PREPARE, RunEvent.MEASURE):
                    leases.advance(db, held, event)
                leases.heartbeat(db, held, leases.Report("measuring", 5_632, 12_288))


def _kernels(db: Database, now: datetime, rng: random.Random) -> None:
    """Test and time the kernels once a week."""
    for week in range(12, -1, -1):
        at = now - timedelta(days=7 * week + 1)
        environment = content.environment_at(7 * week, 365, 0)
        cases = list(_cases(week, rng))
        counts = [sum(c.status == s for c in cases) for s in ("passed", "failed", "not applicable")]
        whole = kernels.KernelBatch(
            new_run_id(), "test", "cuda", environment["git_commit"], environment, at,
            at + timedelta(minutes=4), *counts,
        )  # fmt: skip
        kernels.insert_cases(db, whole, cases)
        bench = kernels.KernelBatch(
            new_run_id(), "bench", "cuda", environment["git_commit"], environment,
            at + timedelta(minutes=5), at + timedelta(minutes=9),
        )  # fmt: skip
        kernels.insert_speeds(db, bench, list(_speeds(rng)))


def _cases(week: int, rng: random.Random) -> Iterator[kernels.KernelCase]:
    for operator in _OPERATORS:
        for backend in _BACKENDS:
            for size in (256, 576, 4096):
                absent = backend == "triton" and operator == "hadamard"
                broken = operator == "w8a8_linear" and backend == "triton" and week < 2
                error = None if absent else 0.03 if broken else 2e-4 * (1 + rng.random())
                status = "not applicable" if absent else "failed" if broken else "passed"
                words = "error 0.03 is above 0.002" if broken else ""
                yield kernels.KernelCase(
                    operator, backend, "g64", (16, size, size), "bfloat16", "contiguous",
                    status, error, 2e-3, words, (),
                )  # fmt: skip


def _speeds(rng: random.Random) -> Iterator[kernels.KernelSpeed]:
    for operator in _OPERATORS:
        for backend in _BACKENDS:
            ratio = {"aten": 0.6, "inductor": 1.3, "triton": 2.1}[backend] * (
                0.95 + 0.1 * rng.random()
            )
            yield kernels.KernelSpeed(
                operator, backend, "g64", (16, 4096, 4096), "bfloat16", ratio, ratio * 0.97,
                ratio * 1.03, 1e-3 / ratio, 1e-3, 20, 1, "",
            )  # fmt: skip


def _parts(session: Session, now: datetime) -> None:
    """Say that the service is up."""
    parts = (
        ("scheduler", {"epoch": 3, figures.LAST_TICK: now.timestamp()}),
        ("worker", {"devices": ["cuda:0"], "run": None}),
        ("delivery", {}),
    )
    for kind, details in parts:
        part = components.Component(f"gpu-1/{kind}", kind, "gpu-1", 4242)
        components.note_seen(session, part, details)
