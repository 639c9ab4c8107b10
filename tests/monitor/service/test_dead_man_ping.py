"""The external dead man is called once per run, by one process, and tells no secret."""

from collections.abc import Mapping
from datetime import timedelta

import pytest
from sqlalchemy import update

from quantwatch.config.endpoints import Endpoint
from quantwatch.config.load import parse
from quantwatch.config.schema import Config
from quantwatch.delivery.client import Answer, Client
from quantwatch.domain import RunStatus
from quantwatch.errors import ConfigError
from quantwatch.observability import redaction
from quantwatch.service.ping import DeadManPing, dead_man_of
from quantwatch.store import clock
from quantwatch.store.queue import NewRun, enqueue
from quantwatch.store.session import Database
from quantwatch.store.tables import RunRow

URL = "https://ping.example/5bf66975-d4c7-4bf5-bcc8-b8d8a82ea278"
CONFIG = parse(Config, {"schema_version": 1, "service": {"dead_man_url_env": "PING"}}, "test")


class FakeClient(Client):
    """Notes what is called; answers with a status or not at all."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status: int | None = 200

    def post(self, endpoint: Endpoint, headers: Mapping[str, str], body: bytes) -> Answer:
        self.calls.append(f"{endpoint.url} {body.decode()}")
        return Answer(status=self.status, error_code=None if self.status else "timeout")


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def ping(db: Database, client: FakeClient) -> DeadManPing:
    endpoint = dead_man_of(CONFIG, {"PING": URL})
    redaction.forget()
    return DeadManPing(db, lambda: endpoint, lambda: True, client)


def ended(db: Database, slot: str, status: RunStatus) -> str:
    """Add a run that has just ended without results."""
    with db.writer() as session:
        run = enqueue(session, NewRun("nightly", slot, {}, "."))
        assert run is not None
        values = {"status": status.value, "finished_at": clock.now(session)}
        session.execute(update(RunRow).where(RunRow.id == run).values(**values))
    return run


def test_a_failed_run_is_called_once(db: Database, ping: DeadManPing, client: FakeClient) -> None:
    """Catches a dead man who is told of a failure as of a success, or every 15 seconds again."""
    run = ended(db, "m:1", RunStatus.FAILED)
    ping()
    ping()
    (call,) = client.calls
    assert call.startswith(f"{URL}/fail?rid=")
    assert call.endswith(f"nightly: run {run} failed")


@pytest.mark.parametrize("status", [RunStatus.SKIPPED, RunStatus.CANCELLED])
def test_what_nobody_waited_for_is_no_end(
    status: RunStatus, db: Database, ping: DeadManPing, client: FakeClient
) -> None:
    """Catches a skipped slot that keeps the dead man quiet."""
    ended(db, "m:1", status)
    ping()
    assert client.calls == []


@pytest.mark.parametrize("status", [500, None], ids=["error", "timeout"])
def test_a_receiver_that_is_down_is_called_again(
    status: int | None, db: Database, ping: DeadManPing, client: FakeClient
) -> None:
    """Catches a call that is lost, and one that overtakes it."""
    first = ended(db, "m:1", RunStatus.FAILED)
    ended(db, "m:2", RunStatus.ABANDONED)
    client.status = status
    ping()
    assert len(client.calls) == 1
    client.status = 200
    ping()
    assert len(client.calls) == 3
    assert first in client.calls[1]


def test_only_the_leader_calls(db: Database, client: FakeClient) -> None:
    """Catches three schedulers that call three times."""
    leads = [False]
    endpoint = dead_man_of(CONFIG, {"PING": URL})
    redaction.forget()
    ping = DeadManPing(db, lambda: endpoint, lambda: leads[0], client)
    ended(db, "m:1", RunStatus.FAILED)
    ping()
    leads[0] = True
    ping()
    assert client.calls == []


def test_ends_from_before_are_not_repeated_after_a_restart(
    db: Database, client: FakeClient
) -> None:
    """Catches a flood of old calls at each start."""
    ended(db, "m:1", RunStatus.FAILED)
    ping = DeadManPing(db, lambda: dead_man_of(CONFIG, {"PING": URL}), lambda: True, client)
    redaction.forget()
    ping()
    db.clock_shift = timedelta(days=1)
    ping()
    assert client.calls == []


def test_the_url_is_a_secret_and_has_to_be_there() -> None:
    """Catches its token in a log, and a service without the dead man it was promised."""
    assert dead_man_of(Config(schema_version=1), {}) is None
    with pytest.raises(ConfigError, match="dead_man_url_env: environment variable PING is not set"):
        dead_man_of(CONFIG, {})
    assert dead_man_of(CONFIG, {"PING": URL}) is not None
    said = redaction.scrub(f"no answer from {URL}/fail")
    redaction.forget()
    assert "5bf66975" not in said
