"""`quantwatch alerts evaluate`: judge a stored run again."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantwatch.cli import options as o
from quantwatch.cli.actor import who
from quantwatch.cli.output import show, show_json, table
from quantwatch.cli.session import Session
from quantwatch.cli.streams import say, whisper

if TYPE_CHECKING:
    from quantwatch.domain import RuleOutcome, RunResult
    from quantwatch.pipeline.evaluating import Evaluation

Force = Annotated[bool, typer.Option("--force", help="Also a run that was judged before.")]
_COLUMNS = ("candidate", "rule", "outcome", "value", "threshold")


def evaluate(
    context: typer.Context, run: o.RunId, force: Force = False, json: o.AsJson = False
) -> None:
    """Judge a stored run under today's rules and today's baseline.

    The run and its verdict stay as they are. Alerts move only by a check's newest verdict.
    """
    from quantwatch.pipeline.evaluating import evaluate_run
    from quantwatch.store.runs import resolve_run_id

    session = Session.of(context, json=json)
    config, _ = session.config()
    with session.writer() as database:
        run_id = resolve_run_id(database, run)
        found = evaluate_run(database, run_id, config, who(), force=force)
    if json:
        show_json(_document(found))
    else:
        _tell(found)


def _tell(found: "Evaluation") -> None:
    name = found.stored.run_id
    if found.judged is None:
        say(f"run {name} was judged before (version {found.version}): nothing is done\n")
        say("--force judges it again, under today's rules\n")
        return
    show(table(list(_COLUMNS), [_line(_rule(one)) for one in found.judged.outcomes]))
    for note in found.notes:
        whisper(f"note: {note}")
    say(f"run {name}, version {found.version}: {_verdicts(found.stored, found.judged)}\n")
    moved = "alerts are moved by it" if found.moved else f"no alert moves: {found.why_not}"
    say(f"compared with: {found.judged.baseline_run_id or 'no baseline'}; {moved}\n")


def _verdicts(stored: "RunResult", judged: "RunResult") -> str:
    """The verdict now, and the one that the run keeps."""
    return f"{_verdict(judged)}; the run's own verdict stays {_verdict(stored)}"


def _verdict(run: "RunResult") -> str:
    return "no verdict" if run.verdict is None else str(run.verdict)


def _document(found: "Evaluation") -> dict[str, Any]:
    judged = found.judged
    return {
        "run": found.stored.run_id,
        "check": found.stored.check,
        "eval_version": found.version,
        "judged": judged is not None,
        "stored_verdict": found.stored.verdict,
        "verdict": None if judged is None else judged.verdict,
        "baseline": None if judged is None else judged.baseline_run_id,
        "moved": found.moved,
        "why_not": found.why_not,
        "notes": list(found.notes),
        "rules": [] if judged is None else [_rule(one) for one in judged.outcomes],
    }


def _rule(outcome: "RuleOutcome") -> dict[str, Any]:
    return {
        "candidate": outcome.candidate,
        "rule": outcome.rule,
        "outcome": outcome.outcome,
        "value": outcome.value,
        "value_kind": outcome.value_kind,
        "threshold": outcome.threshold,
        "words": outcome.words,
    }


def _line(row: dict[str, Any]) -> list[str]:
    return [_text(row[name]) for name in _COLUMNS]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)
