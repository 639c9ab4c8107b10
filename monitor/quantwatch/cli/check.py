"""`quantwatch check`: list, validate and run the checks of quantwatch.toml."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantwatch.cli import options as o
from quantwatch.cli.actor import who
from quantwatch.cli.output import Delivery, show, show_json, table
from quantwatch.cli.queueing import Order, queue, wait
from quantwatch.cli.running import Wishes, run
from quantwatch.cli.session import Session
from quantwatch.cli.streams import say, whisper

if TYPE_CHECKING:
    from quantwatch.config.schema import CheckConfig

app = typer.Typer(help="Checks: what is watched.", no_args_is_help=True)
BaselineFile = Annotated[
    Path | None, typer.Option(help="Compare with this exported run; implies --no-store.")
]
MaybeStore = Annotated[
    bool | None, typer.Option("--store/--no-store", help="Keep the run in the database.")
]
Queue = Annotated[bool, typer.Option("--queue", help="Let the service run it; print the run's id.")]
Key = Annotated[str | None, typer.Option(help="The same key within 24 h queues the same run once.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until the queued run has ended.")]


@app.command("list")
def list_(context: typer.Context, json: o.AsJson = False) -> None:
    """List the checks."""
    config, _ = Session.of(context, json=json).config()
    rows = [_summary(name, check) for name, check in config.checks.items()]
    if json:
        show_json(rows)
    else:
        names = ["name", "reference", "candidates", "suite", "description", "marks"]
        show(table(names, [[str(row[name]) for name in names] for row in rows]))


@app.command("validate")
def validate(context: typer.Context) -> None:
    """Find every mistake that the files show.

    Not looked at are models and this machine: devices, context lengths, hub repositories, and
    whether the scopes of rules and faults exist. `check run` says so before it measures.
    """
    from quantwatch.config.load import validate_files
    from quantwatch.report.numbers import plural

    session = Session.of(context)
    config, folder = session.config()
    validate_files(config, folder, str(session.find_config()))
    say(f"{session.find_config()}: {plural(len(config.checks), 'check is', 'checks are')} valid\n")


@app.command("run")
def run_(
    context: typer.Context,
    name: o.Check,
    *,
    limit: o.Limit = None,
    json: o.AsJson = False,
    baseline: BaselineFile = None,
    store: MaybeStore = None,
    format_: o.AsFormat = None,
    output: o.Output = None,
    yes: o.Yes = False,
    queued: Queue = False,
    key: Key = None,
    wait_: Wait = False,
) -> None:
    """Run a check and exit with its verdict: 0, 1 regression, 4 inconclusive."""
    session = Session.of(context, json=json)
    delivery = Delivery(json=json, shown=format_, files=output)
    here = baseline is not None or store is not None or yes
    order = Order(queued, key, wait_, json, here, shown=bool(format_ or output))
    check, folder = session.check(name)
    if queued:
        run_id = queue(session, name, limited(check, limit), folder, order)
        if wait_:
            wait(session, run_id, delivery)
        return
    keep = baseline is None if store is None else store
    if baseline is not None and store is None:
        whisper("note: not stored, since --baseline FILE needs no database (--store keeps it)")
    run(session, name, limited(check, limit), folder, Wishes(delivery, keep, yes, baseline))


@app.command("release")
def release(context: typer.Context, name: o.Check) -> None:
    """Let a check run again that is in quarantine for killing its worker."""
    from quantwatch.store.quarantine import lift_quarantine

    with Session.of(context).writer() as database:
        lift_quarantine(database, name, who())
    say(f"{name}: may run again\n")


def limited(check: "CheckConfig", limit: int | None) -> "CheckConfig":
    """Return the check on only the first `limit` prompts of its suite."""
    if limit is None:
        return check
    suite = check.suite.model_copy(update={"limit": limit})
    return check.model_copy(update={"suite": suite})


def _summary(name: str, check: "CheckConfig") -> dict[str, str]:
    from quantwatch.config.apply import mark

    suite = check.suite
    return {
        "name": name,
        "reference": check.reference.model or check.reference.factory or "",
        "candidates": ", ".join(candidate.name for candidate in check.candidates),
        "suite": suite.name or ", ".join(suite.files),
        "description": check.description,
        "marks": mark(check),
    }
