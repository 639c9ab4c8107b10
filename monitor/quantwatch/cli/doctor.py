"""`quantwatch doctor`: is everything in place, and what fixes what isn't."""

import typer

from quantwatch.cli import options as o
from quantwatch.cli.output import show, show_json
from quantwatch.cli.session import Session
from quantwatch.errors import MonitorError


def doctor(context: typer.Context, json: o.AsJson = False) -> None:
    """Find what is missing or broken, and name the fix."""
    from quantwatch.cli.probes import examine, renderable

    findings = examine(Session.of(context))
    if json:
        show_json([finding._asdict() for finding in findings])
    else:
        show(renderable(findings))
    broken = [finding.name for finding in findings if finding.state == "broken"]
    if broken:
        raise typer.Exit(MonitorError.exit_code)
