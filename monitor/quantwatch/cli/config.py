"""`quantwatch config`: find mistakes, see what a changed file would change, apply it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from quantwatch.cli import options as o
from quantwatch.cli.actor import who
from quantwatch.cli.output import show_json
from quantwatch.cli.session import Session
from quantwatch.cli.start import loaded_file
from quantwatch.cli.streams import say

if TYPE_CHECKING:
    from quantwatch.config.apply import Change

app = typer.Typer(help="The configuration of the service.", no_args_is_help=True)


@app.command("validate")
def validate(context: typer.Context) -> None:
    """Find every mistake: keys, values, missing files, paths outside the allowed roots, secrets.

    Not looked at are models and this machine: devices, context lengths, hub repositories, and
    whether the scopes of rules and faults exist.
    """
    from quantwatch.config.apply import mark
    from quantwatch.report.numbers import plural

    loaded = loaded_file(Session.of(context))
    config = loaded.config
    for name, check in config.checks.items():
        if words := mark(check):
            say(f"note: check {name} {words}\n")
    checks = plural(len(config.checks), "check")
    endpoints = plural(len(config.endpoints), "endpoint is", "endpoints are")
    say(f"{loaded.path}: {checks}, {endpoints} valid\n")


@app.command("plan")
def plan(context: typer.Context, json: o.AsJson = False) -> None:
    """Show what applying the file would add, remove and change; nothing is changed."""
    from quantwatch.service.configuration import plan_changes

    session = Session.of(context, json=json)
    loaded = loaded_file(session)
    with session.reader() as database:
        _show(plan_changes(database, loaded), json=json)


@app.command("apply")
def apply(context: typer.Context, json: o.AsJson = False) -> None:
    """Apply the file now. A service that watches it has done so a few seconds after the change."""
    from quantwatch.service import configuration

    session = Session.of(context, json=json)
    loaded = loaded_file(session)
    with session.writer() as database:
        _show(configuration.apply(database, loaded, who()), json=json)


def _show(changes: "Sequence[Change]", *, json: bool) -> None:
    if json:
        names = ("action", "kind", "name", "details", "marks")
        show_json([{name: getattr(change, name) for name in names} for change in changes])
        return
    signs = {"added": "+", "removed": "-", "changed": "~"}
    say("".join(f"{signs[change.action]} {change}\n" for change in changes) or "nothing changes\n")
