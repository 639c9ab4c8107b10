"""`quantwatch baseline`: which run others are compared with."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantwatch.cli import options as o
from quantwatch.cli.actor import who
from quantwatch.cli.output import show, show_json, table
from quantwatch.cli.session import Session
from quantwatch.cli.streams import say, whisper
from quantwatch.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quantwatch.domain import Block, RunResult
    from quantwatch.store.baselines import Standing
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
        store_pin(database, result.check, result.run_id, actor=who())
    say(f"{result.check}: baseline is {result.run_id}\n")
    _warn(result)


def _warn(result: "RunResult") -> None:
    """Say that what is wrong with the run is the measure of all later ones."""
    if result.verdict is not None and result.verdict.value == "regression":
        whisper("note: that run is a regression; what is wrong with it won't be reported again")


@app.command("unpin")
def unpin(context: typer.Context, check: o.Check) -> None:
    """Compare later runs of a check with nothing."""
    from quantwatch.store.baselines import unpin as store_unpin

    with Session.of(context).writer() as database:
        store_unpin(database, check, actor=who())
    say(f"{check}: no baseline\n")


@app.command("show")
def show_(context: typer.Context, json: o.AsJson = False) -> None:
    """List the checks that have runs: kind of baseline, which run, since when, by whom."""
    from quantwatch.store.baselines import standings

    with Session.of(context, json=json).reader() as database:
        found = standings(database)
    if json:
        show_json({each.check: _document(each) for each in found})
    else:
        rows = [[each.check, *(str(v or "–") for v in _document(each).values())] for each in found]
        show(table(["check", "kind", "run", "since", "by"], rows))


def _document(standing: "Standing") -> dict[str, str | None]:
    since = None if standing.since is None else standing.since.isoformat(timespec="seconds")
    return {
        "kind": standing.kind,
        "run": standing.run_id,
        "since": since,
        "by": standing.by,
    }


@app.command("export")
def export(context: typer.Context, run: o.RunId, file: File) -> None:
    """Write a run to a file for `check run --baseline FILE`."""
    from quantwatch.baselines.files import export_run
    from quantwatch.pipeline.against import judged_sums

    session = Session.of(context)
    result = session.stored(run)
    with session.reader() as database:
        export_run(result, file, judged_sums(database, result))
    say(f"wrote {file}: run {result.run_id} of {result.check}\n")


@app.command("import")
def import_(context: typer.Context, file: File) -> None:
    """Put an exported run into the database and pin it."""
    from quantwatch.baselines.files import import_run, import_sums
    from quantwatch.store.baselines import pin as store_pin

    result, sums = import_run(file), import_sums(file)
    with Session.of(context).writer() as database:
        keep(database, result, sums)
        store_pin(database, result.check, result.run_id, actor=who())
    say(f"{result.check}: baseline is {result.run_id}\n")
    _warn(result)


def keep(database: "Database", result: "RunResult", sums: "Iterable[Block]") -> None:
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
        runs.finish_run(database, result, None, sums)
    except BaseException:
        runs.end_run(database, result.run_id, RunStatus.FAILED, "import failed")
        raise
