"""`quantwatch endpoints`: the receivers of the configuration and how they are doing."""

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quantwatch.cli import options as o
from quantwatch.cli.actor import who
from quantwatch.cli.output import show, show_json, table
from quantwatch.cli.session import Session
from quantwatch.cli.streams import say, whisper
from quantwatch.errors import UserError

if TYPE_CHECKING:
    from quantwatch.config.endpoints import Endpoint
    from quantwatch.store.deliveries import Message
    from quantwatch.store.endpoints import EndpointState

app = typer.Typer(help="Receivers of messages.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of an endpoint.")]
Kind = Literal["firing", "resolved", "digest", "test"]
Event = Annotated[
    Kind | None, typer.Option(help="A message with made-up data; firing when absent.")
]
OfRun = Annotated[
    str | None, typer.Option(help="The messages that this run led to instead: id, check or latest.")
]


@app.command("list")
def list_(context: typer.Context, json: o.AsJson = False) -> None:
    """List the endpoints: host, format, state, failures in a row. Never a URL."""
    from quantwatch.store.endpoints import list_endpoints

    session = Session.of(context, json=json)
    configured = _endpoints(session)
    with session.reader() as database:
        known = {state.name: state for state in list_endpoints(database)}
    rows = [_row(one, known.get(name)) for name, one in configured.items()]
    if json:
        show_json(rows)
    else:
        show(table(list(_SHOWN), [[_text(row[name]) for name in _SHOWN] for row in rows]))


@app.command("test")
def test(context: typer.Context, name: Name) -> None:
    """Send a test message the way every message goes; exits with 3 when it is not delivered."""
    from quantwatch.delivery import apprise, notices
    from quantwatch.delivery.testing import send_test

    session = Session.of(context)
    endpoints = _endpoints(session)
    endpoint = _known(endpoints, name)
    if endpoint.format == apprise.FORMAT:
        apprise.load()
    with session.writer() as database:
        attempt = send_test(database, endpoint, deaf=notices.deaf(endpoints))
    say(f"{name}: delivered: status {attempt.status} in {attempt.duration_s:.2f} s\n")


@app.command("preview")
def preview(
    context: typer.Context,
    name: Name,
    event: Event = None,
    run: OfRun = None,
    json: o.AsJson = False,
) -> None:
    """Print headers and body that an endpoint would get, without its secrets; nothing is sent."""
    from quantwatch.delivery.formats import most_in_digest
    from quantwatch.delivery.preview import preview

    session = Session.of(context, json=json)
    endpoint = _known(_endpoints(session), name)
    found = [preview(one, endpoint) for one in _messages(session, endpoint, event, run)]
    if event == "digest" and most_in_digest(endpoint) == 1:
        whisper(f"note: {name} gets no digests: it is sent each message alone")
    if json:
        show_json([{"event": one.event, "headers": one.headers, "body": one.body} for one in found])
        return
    for one in found:
        head = "".join(f"{header}: {value}\n" for header, value in one.headers.items())
        say(f"{head}\n{one.body}\n")


@app.command("enable")
def enable(context: typer.Context, name: Name) -> None:
    """Enable an endpoint that was disabled; its dead letters stay until they are replayed."""
    from quantwatch.store.endpoints import enable_endpoint

    with Session.of(context).writer() as database:
        before = enable_endpoint(database, name, who())
    say(f"{name}: enabled (was {before.state})\n")


@app.command("secret")
def secret() -> None:
    """Print a new signing secret for the receiver and for secret_env or secret_file."""
    from quantwatch.delivery.signing import new_signing_secret

    say(f"{new_signing_secret()}\n")


_SHOWN = ("name", "host", "format", "state", "failures", "failing_since", "last_success", "reason")


def _endpoints(session: Session) -> "dict[str, Endpoint]":
    from quantwatch.config.endpoints import resolve_endpoints

    config, folder = session.config()
    return resolve_endpoints(config, folder, os.environ)


def _known(endpoints: "dict[str, Endpoint]", name: str) -> "Endpoint":
    if name not in endpoints:
        raise UserError(f"no endpoint {name!r}; known: {', '.join(endpoints) or 'none'}")
    return endpoints[name]


def _messages(
    session: Session, endpoint: "Endpoint", event: Kind | None, run: str | None
) -> "list[Message]":
    from quantwatch.delivery.samples import as_message, sample
    from quantwatch.store.resolve import resolve_run_id
    from quantwatch.store.told import told_on

    if run is None:
        config, _ = session.config()
        return [sample(event or "firing", endpoint.name, config.service.dashboard_url)]
    if event is not None:
        raise UserError("--event and --run each say what is shown; give one of them")
    with session.reader() as database:
        told = told_on(database, resolve_run_id(database, run))
    return [
        as_message(one.event_id, one.type, one.subject, one.body, endpoint.name) for one in told
    ]


def _row(one: "Endpoint", known: "EndpointState | None") -> dict[str, Any]:
    since = known.failing_since if known else None
    success = known.last_success_at if known else None
    return {
        "name": one.name,
        "host": one.host,
        "format": one.format,
        "guaranteed": one.format != "apprise",
        "private_networks": [str(network) for network in one.networks],
        "state": known.state if known else "never used",
        "failures": known.num_failures if known else 0,
        "failing_since": since.isoformat(timespec="seconds") if since else None,
        "last_success": success.isoformat(timespec="seconds") if success else None,
        "reason": known.reason if known else None,
    }


def _text(value: Any) -> str:
    return "–" if value is None else str(value)
