"""The root command: global options, and every command group hung on it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from quantwatch import __version__
from quantwatch.cli import (
    alerts,
    attribute,
    baseline,
    cache,
    check,
    compare,
    config,
    dashboard,
    db,
    deliveries,
    demo,
    doctor,
    endpoints,
    kernels,
    report,
    runs,
    schedule,
    start,
)
from quantwatch.cli.failures import Guarded, exit_code
from quantwatch.cli.session import Session
from quantwatch.cli.signals import stoppable
from quantwatch.cli.streams import steady
from quantwatch.observability import logs

app = typer.Typer(
    cls=Guarded,
    help="Watch quantized language models for precision regressions.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("compare")(compare.compare)
app.command("attribute")(attribute.attribute)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
app.command("dashboard")(dashboard.dashboard)
app.command("start")(start.start)
app.add_typer(config.app, name="config")
app.add_typer(check.app, name="check")
app.add_typer(runs.app, name="runs")
app.add_typer(schedule.app, name="schedule")
app.add_typer(baseline.app, name="baseline")
app.add_typer(db.app, name="db")
app.add_typer(alerts.app, name="alerts")
app.add_typer(deliveries.app, name="deliveries")
app.add_typer(endpoints.app, name="endpoints")
app.add_typer(kernels.app, name="kernels")
app.add_typer(cache.app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quantwatch {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="quantwatch.toml; the nearest one upwards when absent.")
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL; wins over the configuration.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Keep the global options where every command finds them."""
    _ = version
    # Warnings only; `start` says more.
    logs.configure(logs.wanted_form("text"), everything=False, level=logs.QUIET)
    context.obj = Session(config_path=config, database=database, debug=debug)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0, 1 regression, 2 user, 3 monitor, 4 inconclusive, 130."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    with steady(), stoppable():
        code = exit_code(app, words)
    sys.exit(code)
