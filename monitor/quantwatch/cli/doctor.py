"""`quantwatch doctor`: is everything in place, and what fixes what isn't."""

from typing import Annotated

import typer

from quantwatch.cli import options as o
from quantwatch.cli.output import show, show_json
from quantwatch.cli.session import Session
from quantwatch.errors import MonitorError

Preflight = Annotated[
    bool, typer.Option("--preflight", help="Look at what deployments forget, too: quotas, …")
]


def doctor(context: typer.Context, preflight: Preflight = False, json: o.AsJson = False) -> None:
    """Find what is missing or broken, and name the fix."""
    from quantwatch.cli.preflight import preflight as look_deeper
    from quantwatch.cli.probes import examine, renderable

    session = Session.of(context)
    findings = [*examine(session), *(look_deeper(session) if preflight else [])]
    if json:
        show_json([finding._asdict() for finding in findings])
    else:
        show(renderable(findings))
    broken = [finding.name for finding in findings if finding.state == "broken"]
    if broken:
        raise typer.Exit(MonitorError.exit_code)
