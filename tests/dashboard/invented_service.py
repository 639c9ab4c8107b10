"""A service that runs, as its parts leave it in the database: seen lately, busy, and in some trouble."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select, update
from tests.dashboard.invented_actions import ENDPOINT

from quantwatch.config.schema import CheckConfig
from quantwatch.domain import RunStatus
from quantwatch.store import (
    applied,
    clock,
    failed_tasks,
    leader,
    queue,
    runs,
    schedules,
)
from quantwatch.store.components import Component, note_seen
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import CheckRow, RunAttemptRow, RunRow

EVIL = "<script>alert(1)</script>"
GOING = "01JG" + "0" * 22
"""The run under way of the check chat-int8."""
CARD: dict[str, Any] = {
    "name": f"L4 {EVIL}",
    "memory_used_bytes": {"mean": 9e9, "min": 2e9, "max": 1.2e10},
    "memory_total_bytes": {"mean": 2.4e10, "min": 2.4e10, "max": 2.4e10},
    "utilisation_percent": {"mean": 63.0, "min": 0.0, "max": 100.0},
    "throttle_reasons": ["thermal, by hardware"],
    "not_available": {"power_watts": "Not Supported"},
}


def serve(url: str) -> None:
    """Add parts, a run that waits, a broken endpoint, telemetry, a schedule, and settings."""
    database = open_database(url)
    try:
        with database.writer() as session:
            _parts(session)
            gpus = {"driver": "580", "gpus": {"GPU-1": CARD}}
            session.execute(update(RunAttemptRow).values(gpus=gpus))
            failed_tasks.note_failure(session, "delivery", "http_503", ENDPOINT, f"503 {EVIL}")
            document = session.scalars(select(CheckRow.config).where(CheckRow.name == "demo")).one()
            schedule = {"schedule": {"cron": "0 2 * * *", "zone": "UTC"}}
            config = CheckConfig.model_validate((document or {}) | schedule)
            schedules.apply(session, {"demo": config})
            queue.enqueue(session, queue.NewRun.of("demo", config, "/etc/q", "m:1", actor=EVIL))
            secret = {"url": "https://hooks.example/T000/s3cret-token", "password": "hunter2"}
            applied.apply_settings(session, {"endpoint:ops": secret, "retention": {"odd": 1}})
        leader.acquire(database, "h/scheduler")
    finally:
        database.close()


def _parts(session: Any) -> None:
    tick = {"last_tick": clock.now(session).timestamp() - 3}
    note_seen(session, Component("h/scheduler", "scheduler", "h", 1), tick)
    note_seen(session, Component("h/worker", "worker", "h", 1), {"devices": ["cpu"], "run": None})
    note_seen(session, Component("h", "service", "h", 1), {"config": "/etc/q.toml",
                                                          "config_trouble": EVIL})  # fmt: skip


def begin_going(url: str) -> None:
    """Add a run under way."""
    database = open_database(url)
    try:
        runs.begin_run(
            database, run_id=GOING, check="chat-int8", config={}, started_at=datetime.now(UTC)
        )
        runs.advance_run(database, GOING, RunStatus.MEASURING)
        go_on(database, "bf16", 300)
    finally:
        database.close()


def go_on(database: Database, stage: str, tokens: int) -> None:
    """Let the run under way be so far, of 1200 tokens, with a worker that was just heard of."""
    with database.writer() as session:
        done = {"stage": stage, "tokens_done": tokens, "tokens_total": 1200}
        heard = {"heartbeat_at": clock.now(session)}
        session.execute(update(RunRow).where(RunRow.id == GOING).values(**done, **heard))
