"""/metrics, /healthz and /readyz as a client sees them, over a real socket."""

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quantwatch.errors import UserError
from quantwatch.observability import meters, redaction
from quantwatch.service.exposition import CACHED_S, Exposition, show
from quantwatch.service.health import CACHED_S as HEALTH_CACHED_S
from quantwatch.service.health import LONGEST_SILENCE_S, Health
from quantwatch.service.metrics import MetricsServer
from quantwatch.store import clock
from quantwatch.store.components import Component, note_seen
from quantwatch.store.disk import Space
from quantwatch.store.figures import LAST_TICK, Figures, Reading
from quantwatch.store.session import Database


class Clock:
    """A monotonic clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def tick(db: Database, seconds_ago: float) -> None:
    with db.writer() as session:
        at = clock.now(session).timestamp() - seconds_ago
        note_seen(session, Component("s", "scheduler", "host", 1), {LAST_TICK: at})


@pytest.fixture
def parts(part: Any) -> list[Any]:
    return [part("scheduler", is_alive=True), part("worker", is_alive=True)]


@pytest.fixture
def moment() -> Clock:
    return Clock()


@pytest.fixture
def server(db: Database, parts: list[Any], moment: Clock) -> Iterator[MetricsServer]:
    health = Health(db, lambda: parts, schedules=True, clock=moment)
    found = MetricsServer(("127.0.0.1", 0), Exposition(db, clock=moment), health)
    found.start()
    yield found
    found.stop(5)
    assert not found.is_alive


def values(text: str) -> dict[str, float]:
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {sample.name: sample.value for sample in samples if not sample.labels}


def test_metrics_are_text_that_prometheus_reads(server: MetricsServer) -> None:
    """Catches an exposition that the scraper refuses."""
    status, text = get(server.port, "/metrics")
    assert status == 200
    found = values(text)
    assert found["quantwatch_database_up"] == 1
    assert found["quantwatch_db_size_bytes"] > 0
    assert found["quantwatch_delivery_oldest_pending_seconds"] == 0


def test_figures_of_the_database_are_fresh_but_cached(
    server: MetricsServer, db: Database, moment: Clock
) -> None:
    """Catches a scrape per client that scans the database, and a value that never changes."""
    get(server.port, "/metrics")
    tick(db, 0)
    before = values(get(server.port, "/metrics")[1])[
        "quantwatch_scheduler_last_tick_timestamp_seconds"
    ]
    moment.now += CACHED_S
    after = values(get(server.port, "/metrics")[1])[
        "quantwatch_scheduler_last_tick_timestamp_seconds"
    ]
    assert before != before  # noqa: PLR0124 - not known yet: NaN, not 1970
    assert after > 1_700_000_000


def test_without_a_database_counters_are_still_served(
    server: MetricsServer, db: Database, moment: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a blind monitor at the very moment when its database is away."""
    from quantwatch.errors import StoreError
    from quantwatch.service import exposition

    def away(*_: object) -> None:
        raise StoreError("away")

    monkeypatch.setattr(exposition, "read_figures", away)
    moment.now += CACHED_S
    status, text = get(server.port, "/metrics")
    found = values(text)
    assert status == 200
    assert found["quantwatch_database_up"] == 0
    assert found["quantwatch_db_size_bytes"] != found["quantwatch_db_size_bytes"]


def test_healthz_says_which_part_is_dead(server: MetricsServer, parts: list[Any]) -> None:
    """Catches a container that stays up with a dead worker."""
    assert get(server.port, "/healthz")[0] == 200
    parts[1].is_alive = False
    status, text = get(server.port, "/healthz")
    assert status == 503
    assert json.loads(text)["parts"] == {"scheduler": "alive", "worker": "dead"}


def test_healthz_does_not_ask_the_database(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches containers that are all restarted because the database was."""
    from quantwatch.service import health

    monkeypatch.setattr(health, "state_of", None)
    assert get(server.port, "/healthz")[0] == 200


@pytest.mark.parametrize(
    ("seconds_ago", "status", "words"),
    [
        (None, 503, "has not looked yet"),
        (5, 200, "ok"),
        (LONGEST_SILENCE_S + 10, 503, "has not looked for"),
    ],
)
def test_readyz_wants_a_scheduler_that_looks(
    seconds_ago: float | None, status: int, words: str, server: MetricsServer, db: Database
) -> None:
    """Catches a scheduler whose clock stands still (B04)."""
    if seconds_ago is not None:
        tick(db, seconds_ago)
    found, text = get(server.port, "/readyz")
    assert found == status
    assert json.loads(text)["scheduler"].startswith(words)


def test_readyz_wants_a_database_with_our_schema(
    server: MetricsServer, db: Database, moment: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches traffic sent to a process that can't read its database, and a secret in the reason."""
    from quantwatch.service import health

    tick(db, 0)
    assert get(server.port, "/readyz")[0] == 200
    redaction.register("canary-4711")
    db.name = "postgresql://canary-4711@host/db"
    monkeypatch.setattr(health, "state_of", lambda *_: "behind")
    assert get(server.port, "/readyz")[0] == 200
    moment.now += HEALTH_CACHED_S
    status, text = get(server.port, "/readyz")
    redaction.forget()
    assert status == 503
    assert "run `quantwatch db upgrade`" in text
    assert "canary" not in text


def test_anything_else_is_not_found_and_nothing_can_be_changed(server: MetricsServer) -> None:
    """Catches a page that shows more than it should."""
    assert get(server.port, "/")[0] == 404
    assert get(server.port, "/metrics?x=1")[0] == 200
    assert get(server.port, "/metrics", "POST")[0] == 501


def test_a_client_that_says_nothing_blocks_nobody(server: MetricsServer) -> None:
    """Catches one thread for all clients."""
    with socket.create_connection(("127.0.0.1", server.port)):
        assert get(server.port, "/healthz")[0] == 200


def test_a_taken_port_is_said(server: MetricsServer, db: Database, parts: list[Any]) -> None:
    """Catches a service without metrics because another one has the port."""
    health = Health(db, lambda: parts, schedules=False)
    with pytest.raises(UserError, match=r"metrics_address: 127\.0\.0\.1:\d+ can't be listened on"):
        MetricsServer(("127.0.0.1", server.port), Exposition(db), health)


def test_values_that_are_gone_are_not_shown_for_ever() -> None:
    """Catches the KL of a candidate that was removed, and a resolved alert that stays at 1."""
    reading = Reading("nightly", "int8", "mean", 0.2)
    show(Figures({}, {("critical", "firing"): 1}, 0, 1, Space(1, 2), 1.0, [reading], []))
    alive = meters.ALERTS.labels(severity="critical", state="firing")._value
    assert alive.get() == 1
    show(Figures({}, {}, 0, 1, Space(1, 2), 1.0, [], []))
    assert meters.ALERTS.labels(severity="critical", state="firing")._value.get() == 0
    assert not [s for family in meters.KL.collect() for s in family.samples]
