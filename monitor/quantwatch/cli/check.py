"""`quantwatch check`: list, validate and run the checks of quantwatch.toml."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantwatch.cli import options as o
from quantwatch.cli.output import Delivery, show, show_json, table
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


@app.command("list")
def list_(context: typer.Context, json: o.AsJson = False) -> None:
    """List the checks."""
    config, _ = Session.of(context, json=json).config()
    rows = [_summary(name, check) for name, check in config.checks.items()]
    if json:
        show_json(rows)
    else:
        names = ["name", "reference", "candidates", "suite", "description"]
        show(table(names, [[str(row[name]) for name in names] for row in rows]))


@app.command("validate")
def validate(context: typer.Context) -> None:
    """Find every mistake in the configuration."""
    from quantwatch.config.load import validate_files

    session = Session.of(context)
    config, folder = session.config()
    validate_files(config, folder, str(session.find_config()))
    say(f"{session.find_config()}: {len(config.checks)} checks are valid\n")


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
) -> None:
    """Run a check and exit with its verdict: 0, 1 regression, 4 inconclusive."""
    session = Session.of(context, json=json)
    delivery = Delivery(json=json, shown=format_, files=output)
    check, folder = session.check(name)
    keep = baseline is None if store is None else store
    if baseline is not None and store is None:
        whisper("note: not stored, since --baseline FILE needs no database (--store keeps it)")
    run(session, name, limited(check, limit), folder, Wishes(delivery, keep, yes, baseline))


def limited(check: "CheckConfig", limit: int | None) -> "CheckConfig":
    """Return the check on only the first `limit` prompts of its suite."""
    if limit is None:
        return check
    suite = check.suite.model_copy(update={"limit": limit})
    return check.model_copy(update={"suite": suite})


def _summary(name: str, check: "CheckConfig") -> dict[str, str]:
    suite = check.suite
    return {
        "name": name,
        "reference": check.reference.model or check.reference.factory or "",
        "candidates": ", ".join(candidate.name for candidate in check.candidates),
        "suite": suite.name or ", ".join(suite.files),
        "description": check.description,
    }
