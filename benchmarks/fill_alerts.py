"""What `fill_service.py` writes of alerts: episodes, who was told, what rules said of runs."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import fill_content as content
from fill_content import Plan, Story
from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from quantwatch.store import clock, deliveries, episodes, failed_tasks, leases, outbox
from quantwatch.store.episodes import Episode
from quantwatch.store.tables import CheckRow, EpisodeRow, RuleEvaluationRow, RunCandidateRow, RunRow
from quantwatch.telemetry import new_run_id

ENDPOINTS = ("slack-quality", "pagerduty", "warehouse")
_BROKEN = "warehouse"
_RULES = {
    "fault": ("isolated-error-outlier", "critical", "isolated_error", 0.024, 0.136),
    "warn": ("layer-kl", "warning", "lens_kl", 0.15, 0.19),
    "nan": ("nonfinite", "critical", "rel_error", 0.0, None),
}
_KEPT_EVALUATIONS = 60


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


def told(plan: Plan, stories: Sequence[Story], now: datetime) -> Iterator[Told]:
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


def deliver(session: Session, rng: random.Random) -> None:
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


def evaluate(session: Session, now: datetime) -> None:
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
