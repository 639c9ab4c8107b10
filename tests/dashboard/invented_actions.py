"""Things to act on in a database: an alert that fires, a dead letter, a check in quarantine."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select, update

from quantwatch.config.schema import CheckConfig
from quantwatch.store import applied, lookups
from quantwatch.store.endpoints import sync_endpoints
from quantwatch.store.session import open_database
from quantwatch.store.tables import (
    AlertRow,
    CheckRow,
    DeliveryRow,
    EndpointRow,
    EpisodeRow,
    EventRow,
)

NOW = datetime(2026, 11, 30, 1, tzinfo=UTC)
CONFIG = {
    "reference": {"model": "org/m"},
    "candidates": [{"name": "int8", "model": "org/m8"}],
    "suite": "core-v1:demo",
}
EVENT, ENDPOINT, QUARANTINED = "01JE0000000000000000000001", "ops", "poisonous"
EPISODE = "01JA"
"""The open one of the check demo."""
RUN = "01JD0000000000000000000006"
"""A succeeded run of the check demo in the filled database."""


def furnish(url: str) -> int:
    """Add them to the filled database; return the number of the alert."""
    database = open_database(url)
    try:
        with database.writer() as session:
            document = CheckConfig.model_validate(CONFIG).model_dump(mode="json")
            applied.apply_checks(session, {"demo": document}, "/etc/quantwatch")
            lookups.check_id(session, QUARANTINED)
            apart = update(CheckRow).where(CheckRow.name == QUARANTINED)
            session.execute(apart.values(quarantined_at=NOW))
            alert = _alert(session)
            _dead_letter(session)
            return alert
    finally:
        database.close()


def apply_to_demo(url: str, document: dict[str, Any]) -> None:
    """Let the database hold settings of the check demo, whatever they are."""
    database = open_database(url)
    try:
        with database.writer() as session:
            applied.apply_checks(session, {"demo": document}, "/etc/quantwatch")
    finally:
        database.close()


def endpoint_state(url: str, state: str) -> None:
    """Enable or disable the endpoint without anybody's action."""
    database = open_database(url)
    try:
        with database.writer() as session:
            session.execute(update(EndpointRow).values(state=state))
    finally:
        database.close()


def _alert(session: Any) -> int:
    check_id = session.scalars(select(CheckRow.id).where(CheckRow.name == "demo")).one()
    alert = AlertRow(
        check_id=check_id, candidate="int8-fault", rule="output-kl", state="firing",
        severity="critical", episode_id=EPISODE, last_run_id=RUN, changed_at=NOW,
    )  # fmt: skip
    session.add(alert)
    session.flush()
    episode = EpisodeRow(
        id=EPISODE, alert_id=alert.id, severity="critical", opened_at=NOW, fired_at=NOW,
        first_run_id=RUN, last_run_id=RUN, num_runs=1, peak_value=0.31, peak_kind="finite",
        told=[], evidence={"words": "output KL 0.31 > 0.15"},
    )  # fmt: skip
    session.add(episode)
    session.flush()
    return int(alert.id)


def _dead_letter(session: Any) -> None:
    sync_endpoints(session, {ENDPOINT: "x"})
    session.add(
        EventRow(id=EVENT, type="test", occurred_at=NOW, subject="endpoint:ops", seq=1, body=b"{}")
    )
    session.flush()
    session.add(
        DeliveryRow(
            event_id=EVENT,
            endpoint=ENDPOINT,
            subject="endpoint:ops",
            seq=1,
            state="dead",
            attempt=9,
            created_at=NOW,
            next_at=NOW,
            left_machine=True,
            ended_at=NOW,
        )
    )
