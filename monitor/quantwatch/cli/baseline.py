"""`quantwatch baseline`: which run others are compared with."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantwatch.cli import options as o
from quantwatch.cli.output import show, show_json, table
from quantwatch.cli.session import Session
from quantwatch.cli.streams import say
from quantwatch.errors import UserError

if TYPE_CHECKING:
    from quantwatch.domain import RunResult
    from quantwatch.store.session import Database

app = typer.Typer(help="Baselines: what runs are compared with.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(help="Exported run (JSON).")]


@app.command("pin")
def pin(context: typer.Context, run: o.RunId) -> None:
    """Compare later runs of the run's check with it."""
    from quantwatch.store.baselines import pin as store_pin

    session = Session.of(context)
    result = session.stored(run)
    with session.writer() as database:
        store_pin(database, result.check, result.run_id)
    say(f"{result.check}: baseline is {result.run_id}\n")


@app.command("unpin")
def unpin(context: typer.Context, check: o.Check) -> None:
    """Compare later runs of a check with nothing."""
    from quantwatch.store.baselines import unpin as store_unpin

    with Session.of(context).writer() as database:
        store_unpin(database, check)
    say(f"{check}: no baseline\n")


@app.command("show")
def show_(context: typer.Context, json: o.AsJson = False) -> None:
    """List the checks that have runs and the baseline of each."""
    from quantwatch.store.baselines import get_pinned
    from quantwatch.store.runs import latest_by_check

    with Session.of(context, json=json).reader() as database:
        checks = [run.check for run in latest_by_check(database)]
        pinned = {check: get_pinned(database, check) for check in checks}
    if json:
        show_json(pinned)
    else:
        show(table(["check", "baseline"], [[c, run or "none"] for c, run in pinned.items()]))


@app.command("export")
def export(context: typer.Context, run: o.RunId, file: File) -> None:
    """Write a run to a file for `check run --baseline FILE`."""
    from quantwatch.baselines.files import export_run

    result = Session.of(context).stored(run)
    export_run(result, file)
    say(f"wrote {file}: run {result.run_id} of {result.check}\n")


@app.command("import")
def import_(context: typer.Context, file: File) -> None:
    """Put an exported run into the database and pin it."""
    from quantwatch.baselines.files import import_run
    from quantwatch.store.baselines import pin as store_pin

    result = import_run(file)
    with Session.of(context).writer() as database:
        keep(database, result)
        store_pin(database, result.check, result.run_id)
    say(f"{result.check}: baseline is {result.run_id}\n")


def keep(database: "Database", result: "RunResult") -> None:
    """Store a run that came from a file, unless it is stored already. It has no token matrices."""
    from quantwatch.domain import RunStatus
    from quantwatch.store import runs

    with contextlib.suppress(UserError):
        runs.get_result(database, result.run_id)
        return
    runs.begin_run(
        database,
        run_id=result.run_id,
        check=result.check,
        config=result.config,
        started_at=result.started_at,
    )
    try:
        runs.finish_run(database, result, None, ())
    except BaseException:
        runs.end_run(database, result.run_id, RunStatus.FAILED, "import failed")
        raise
