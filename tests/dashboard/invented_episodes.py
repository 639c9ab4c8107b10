"""Episodes of alerts, invented: records for pure functions, and rows in a database."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import update
from tests.dashboard.invented_actions import NOW

from quantwatch.store import episodes, outbox
from quantwatch.store.alert_history import Listed
from quantwatch.store.endpoints import sync_endpoints
from quantwatch.store.episodes import Episode
from quantwatch.store.session import open_database
from quantwatch.store.silences import StoredSilence
from quantwatch.store.tables import DeliveryRow, EventRow, RuleEvaluationRow

EVIDENCE: Mapping[str, Any] = {
    "metric": "lens_kl", "statistic": "mean", "scope": "layers.28", "value": 0.19,
    "value_kind": "finite", "threshold": 0.15, "words": "lens_kl.mean at layers.28 is above 0.15",
    "scopes": [{"scope": "layers.28", "metric": "lens_kl", "statistic": "mean", "value": 0.19,
                "value_kind": "finite", "threshold": 0.15, "prompt": 3, "position": 17}],
    "more_scopes": 2, "run": "01JD0000000000000000000006",
}  # fmt: skip


def hours(count: float) -> datetime:
    """Return an instant so many hours after the beginning of what is invented."""
    return NOW + timedelta(hours=count)


def an_episode(**values: Any) -> Episode:
    """Return an episode that opened and fired at the beginning."""
    usual = Episode(
        "01JE", 1, "critical", NOW, NOW, None, None, "01JR1", "01JR2", 2, 0.2, "finite", (), None,
        None, None, None, None, EVIDENCE,
    )  # fmt: skip
    return replace(usual, **values)


def listed(state: str = "firing", *, rule: str = "layer-kl", **values: Any) -> Listed:
    """Return an episode of the check demo; a state of `ended` needs no instant."""
    if state == "ended":
        values = {"resolved_at": hours(9), "resolve_reason": "recovered"} | values
    if state == "pending":
        values = {"fired_at": None} | values
    return Listed(1, "demo", "int8", rule, state, None, 1, 0, an_episode(**values))


def a_silence(matcher: Mapping[str, str], begin: float = 1, end: float = 4) -> StoredSilence:
    """Return a silence of somebody, in hours after the beginning."""
    return StoredSilence(7, matcher, hours(begin), hours(end), "lee", "calibration")


def write_ended(url: str, alert_id: int, episode_id: str = "01JOLD", comment: str = "seen") -> None:
    """Write an episode that fired, was told to two, acknowledged, and ended."""
    database = open_database(url)
    try:
        with database.writer() as session:
            sync_endpoints(session, {"ops": "x", "pager": "y"})
            values: dict[str, Any] = {"resolved_at": hours(-20), "resolve_reason": "recovered"}
            began = {"opened_at": hours(-40), "fired_at": hours(-40), "told": ("ops", "pager")}
            acked = {"acked_at": hours(-30), "acked_by": "dana", "ack_comment": comment}
            one = an_episode(id=episode_id, alert_id=alert_id, **values, **began, **acked)
            episodes.add_episode(session, one)
            body = {"type": "alert.firing", "data": {"alerts": [{"episode": episode_id}]}}
            event = outbox.Event("alert.firing", "demo/int8-fault", body)
            event_id = outbox.publish(session, event, ["ops", "pager"])
            mine = EventRow.id == event_id
            session.execute(update(EventRow).where(mine).values(occurred_at=hours(-40)))
            dead = DeliveryRow.endpoint == "pager"
            lost = {"state": "dead", "ended_at": hours(-38), "last_error": "410 Gone <b>"}
            session.execute(update(DeliveryRow).where(dead).values(attempt=5, **lost))
            for at, outcome, run in ((-30, "clear", 3), (-20, "clear", 4)):
                row = {"alert_id": alert_id, "run_id": f"01JD{run:022d}", "outcome": outcome}
                value = {"value": 0.05, "value_kind": "finite", "threshold": 0.15}
                session.add(RuleEvaluationRow(**row, **value, evaluated_at=hours(at)))
    finally:
        database.close()
