"""`quantwatch runs`: what was measured before."""

from typing import TYPE_CHECKING, Annotated

import typer

from quantwatch.cli import options as o
from quantwatch.cli.actor import who
from quantwatch.cli.output import Delivery, show, show_json, table
from quantwatch.cli.session import Session
from quantwatch.cli.streams import say

if TYPE_CHECKING:
    from quantwatch.store.records import RunSummary

app = typer.Typer(help="Runs: what was measured before.", no_args_is_help=True)
OneCheck = Annotated[str | None, typer.Option(help="Only runs of this check.")]
Reason = Annotated[str, typer.Option(help="Why; kept with the run.")]
Count = Annotated[int, typer.Option(min=1, help="At most so many, newest first.")]


@app.command("list")
def list_(
    context: typer.Context, check: OneCheck = None, limit: Count = 50, json: o.AsJson = False
) -> None:
    """List runs, newest first."""
    from quantwatch.store.resolve import require_check
    from quantwatch.store.runs import list_runs

    with Session.of(context, json=json).reader() as database:
        if check is not None:
            with database.reader() as session:
                require_check(session, check)
        rows = [_summary(run) for run in list_runs(database, check, limit)]
    if json:
        show_json(rows)
    else:
        names = ["run_id", "check", "status", "verdict", "started_at", "candidates", "reason"]
        show(table(names, [[str(row[name] or "–") for name in names] for row in rows]))


@app.command("show")
def show_(context: typer.Context, run: o.RunId, json: o.AsJson = False) -> None:
    """Show a run as it was shown when it ended."""
    session = Session.of(context, json=json)
    Delivery(json=json, shown=None, files=None).deliver(session.stored(run))


@app.command("diff")
def diff(context: typer.Context, before: o.RunId, after: o.RunId, json: o.AsJson = False) -> None:
    """Put two runs side by side.

    Runs that measured different things are refused with exit code 4.
    """
    from quantwatch.baselines.comparable import mismatches
    from quantwatch.errors import BaselineMismatchError
    from quantwatch.report.side_by_side import COLUMNS, side_by_side, texts

    session = Session.of(context, json=json)
    a, b = session.stored(before), session.stored(after)
    if differing := mismatches(b, a):
        raise BaselineMismatchError(f"{a.run_id} and {b.run_id}: {'; '.join(differing)}")
    rows = side_by_side(a, b)
    if json:
        show_json({"before": a.run_id, "after": b.run_id, "rows": rows})
    else:
        show(table(list(COLUMNS), texts(rows)))


@app.command("cancel")
def cancel(context: typer.Context, run: o.RunId, reason: Reason) -> None:
    """Stop a run that waits or is measured; says in which state that leaves it."""
    from quantwatch.store.cancelling import request_cancel
    from quantwatch.store.runs import resolve_run_id

    with Session.of(context).writer() as database:
        run_id = resolve_run_id(database, run)
        status = request_cancel(database, run_id, actor=who(), reason=reason)
    say(f"{run_id}: {status if status.is_ended else 'stops soon'}\n")


def _summary(run: "RunSummary") -> dict[str, str | int | None]:
    verdicts = ", ".join(f"{name} {verdict or 'failed'}" for name, verdict in run.candidates)
    return {
        "run_id": run.run_id,
        "check": run.check,
        "status": str(run.status),
        "verdict": str(run.verdict) if run.verdict else None,
        "started_at": run.started_at.isoformat(timespec="seconds"),
        "suite": run.suite_name,
        "num_tokens": run.num_tokens,
        "num_alerts": run.num_alerts,
        "candidates": verdicts,
        "reason": run.reason,
    }
