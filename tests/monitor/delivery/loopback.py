"""Receivers on the loopback that answer as they are told, lanes to them, looks into the database."""

import ipaddress
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from sqlalchemy import select, text

from quantwatch.config.endpoints import Endpoint
from quantwatch.config.secrets import Secret
from quantwatch.delivery.client import Client, Limits
from quantwatch.delivery.lane import Lane
from quantwatch.store import clock
from quantwatch.store.endpoints import sync_endpoints
from quantwatch.store.outbox import Event, publish
from quantwatch.store.session import Database
from quantwatch.store.tables import DeliveryAttemptRow, DeliveryRow, EndpointRow, EventRow

SECRET = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo="
LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
Answers = Callable[["Request"], "Reply"]


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: bytes
    number: int

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def document(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"ok"
    misbehave: Callable[[BaseHTTPRequestHandler], None] | None = None
    """Does what a receiver should not, instead of answering."""


class Receiver:
    """A real HTTP server on 127.0.0.1."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answer: Answers = lambda _request: Reply()
        self.lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                size = int(self.headers.get("content-length", 0))
                body = self.rfile.read(size)
                headers = {k.lower(): v for k, v in self.headers.items()}
                with receiver.lock:
                    request = Request(self.path, headers, body, len(receiver.requests))
                    receiver.requests.append(request)
                reply = receiver.answer(request)
                if reply.misbehave is not None:
                    self.close_connection = True
                    reply.misbehave(self)
                    return
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)

            do_GET = do_POST  # noqa: N815 - http.server's own names

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that goes away early is what some tests are about."""

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.port = int(self.server.server_address[1])
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    @property
    def ids(self) -> list[str]:
        return [request.id for request in self.requests]

    def statuses(self, *statuses: int, headers: Mapping[str, str] | None = None) -> None:
        """Answer with these, one after another; the last one for good."""
        self.answer = lambda request: Reply(
            statuses[min(request.number, len(statuses) - 1)], headers or {}
        )

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def endpoint_to(port: int, name: str = "hook", **fields: Any) -> Endpoint:
    known: dict[str, Any] = {
        "secrets": (Secret(SECRET),),
        "networks": LOOPBACK,
        "rate_per_minute": 10_000,
    }
    url = httpx.URL(f"http://127.0.0.1:{port}{fields.pop('path', '/hook')}")
    return Endpoint(name=name, url=url, **(known | fields))


def client(**fields: Any) -> Client:
    limits = Limits(connect_s=fields.pop("connect_s", 2.0), total_s=fields.pop("total_s", 2.0))
    return Client(limits=limits, **fields)


def lane_to(db: Database, endpoint: Endpoint, chance: float = 0.5, **fields: Any) -> Lane:
    """Return a lane; its endpoint is known to the database."""
    know(db, endpoint)
    return Lane(db, endpoint, client(**fields), lambda: chance)


def know(db: Database, *endpoints: Endpoint) -> None:
    with db.writer() as session:
        sync_endpoints(session, {one.name: one.settings_sha for one in endpoints})


def tell(
    db: Database,
    kind: str = "alert.firing",
    subject: str = "nightly/int4",
    endpoints: Sequence[str] = ("hook",),
    **data: Any,
) -> str:
    body = {"type": kind, "timestamp": "2026-11-29T02:00:00Z", "data": {"title": "KL up"} | data}
    with db.writer() as session:
        return publish(session, Event(kind, subject, body), endpoints)


def fire(db: Database, *episodes: str, **fields: Any) -> str:
    alerts = [{"episode": one, "rule": one, "change": "fired"} for one in episodes]
    return tell(db, "alert.firing", alerts=alerts, reason="first", **fields)


def resolve(db: Database, *episodes: str, reason: str = "resolved_all", **fields: Any) -> str:
    alerts = [{"episode": one, "rule": one, "change": "resolved"} for one in episodes]
    return tell(db, "alert.resolved", alerts=alerts, reason=reason, **fields)


def later(db: Database, **amount: float) -> None:
    """Move the database's clock."""
    db.clock_shift += timedelta(**amount)


def to_next(db: Database) -> None:
    """Move the database's clock to when the next delivery may be tried."""
    waiting = [row.next_at for row in rows(db) if row.state in ("pending", "retry_wait")]
    with db.reader() as session:
        moment = clock.now(session)
    future = [at for at in waiting if at > moment]
    if future:
        db.clock_shift += min(future) - moment + timedelta(milliseconds=5)


def rows(db: Database, **where: Any) -> list[DeliveryRow]:
    query = select(DeliveryRow).filter_by(**where).order_by(DeliveryRow.id)
    with db.reader() as session:
        found = list(session.scalars(query))
        session.expunge_all()
    return found


def states(db: Database, **where: Any) -> list[str]:
    return [row.state for row in rows(db, **where)]


def health_of(db: Database, name: str = "hook") -> EndpointRow:
    with db.reader() as session:
        row = session.get_one(EndpointRow, name)
        session.expunge_all()
    return row


def attempts(db: Database) -> list[DeliveryAttemptRow]:
    query = select(DeliveryAttemptRow).order_by("delivery_id", "number")
    with db.reader() as session:
        found = list(session.scalars(query))
        session.expunge_all()
    return found


def events(db: Database, kind: str) -> list[EventRow]:
    with db.reader() as session:
        found = list(session.scalars(select(EventRow).filter_by(type=kind).order_by("id")))
        session.expunge_all()
    return found


def until_waiting(db: Database) -> None:
    """Return once another session waits for a lock."""
    query = text(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    until = time.monotonic() + 30
    while True:
        with db.reader() as session:
            if session.scalar(query):
                return
        assert time.monotonic() < until, "nobody waits"
        threading.Event().wait(0.01)
