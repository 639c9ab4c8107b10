"""`quantwatch alerts`: what fires, and what a team does about it."""

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantwatch.cli import options as o
from quantwatch.cli.actor import who
from quantwatch.cli.evaluate import evaluate
from quantwatch.cli.output import show, show_json, table
from quantwatch.cli.session import Session
from quantwatch.cli.streams import say, whisper
from quantwatch.errors import UserError

if TYPE_CHECKING:
    from sqlalchemy.orm import Session as DatabaseSession

    from quantwatch.store.episodes import StoredAlert
    from quantwatch.store.silences import StoredSilence

app = typer.Typer(help="Alerts: what fires, and what is done about it.", no_args_is_help=True)
AlertId = Annotated[int, typer.Argument(metavar="ID", help="Number of an alert, as listed.")]
EpisodeId = Annotated[
    str | None,
    typer.Option("--episode", help="Only if this one is still open, as listed or as it was told."),
]
SilenceId = Annotated[int, typer.Argument(metavar="ID", help="Number of a silence, as listed.")]
Comment = Annotated[str, typer.Option(help="Why, for the others.")]
All = Annotated[bool, typer.Option("--all", help="Alerts that are inactive as well.")]
Length = Annotated[str, typer.Option("--for", help="How long, e.g. 2h or 1d.")]
CheckGlob = Annotated[str | None, typer.Option("--check", help="Glob over checks.")]
CandidateGlob = Annotated[str | None, typer.Option("--candidate", help="Glob over candidates.")]
RuleGlob = Annotated[str | None, typer.Option("--rule", help="Glob over rules.")]
SeverityGlob = Annotated[str | None, typer.Option("--severity", help="warning or critical.")]
_COLUMNS = ("id", "check", "candidate", "rule", "state", "severity", "since", "value", "note")
app.command("evaluate")(evaluate)


@app.command("list")
def list_(context: typer.Context, all_: All = False, json: o.AsJson = False) -> None:
    """List the alerts that are pending, firing or recovering."""
    from quantwatch.store import episodes

    read = episodes.all_alerts if all_ else episodes.open_alerts
    with Session.of(context, json=json).reader() as database, database.reader() as session:
        rows = _rows(session, read(session))
    if json:
        show_json(rows)
    else:
        show(table(list(_COLUMNS), [_line(row) for row in rows]))


@app.command("ack")
def ack(
    context: typer.Context, alert: AlertId, comment: Comment, *, episode: EpisodeId = None
) -> None:
    """Say that you look after an alert: no more reminders."""
    from quantwatch.store.episodes import acknowledge

    with Session.of(context).writer() as database, database.writer() as session:
        found = acknowledge(session, alert, who(), comment, episode_id=episode)
    say(f"alert {alert}: {found.check} {found.candidate} {found.rule} is acknowledged\n")


@app.command("silence")
def silence(
    context: typer.Context,
    length: Length,
    comment: Comment,
    *,
    check: CheckGlob = None,
    candidate: CandidateGlob = None,
    rule: RuleGlob = None,
    severity: SeverityGlob = None,
) -> None:
    """Keep matching alerts from being told for a while; they go on being evaluated."""
    from quantwatch.alerts.silences import checked_matcher, idle_globs
    from quantwatch.config.default_rules import DEFAULT_RULES
    from quantwatch.store.silences import add_silence, known_labels

    globs = {"check": check, "candidate": candidate, "rule": rule, "severity": severity}
    matcher, lasting = checked_matcher(globs), _length(length)
    with Session.of(context).writer() as database, database.writer() as session:
        made = add_silence(session, matcher, lasting, who(), comment)
        known = known_labels(session)
    known["rule"] |= {rule.name for rule in DEFAULT_RULES}
    idle = idle_globs(matcher, known)
    say(f"silence {made.id}: until {made.ends_at:%Y-%m-%d %H:%M} UTC\n")
    for label, glob in idle.items():
        whisper(f"note: no {label} that is known here matches {glob!r} so far")


@app.command("silences")
def silences(context: typer.Context, json: o.AsJson = False) -> None:
    """List the silences that hold now."""
    from quantwatch.store.silences import active_silences

    with Session.of(context, json=json).reader() as database, database.reader() as session:
        rows = [_silence(found) for found in active_silences(session)]
    if json:
        show_json(rows)
    else:
        names = ["id", "matcher", "ends_at", "author", "comment"]
        show(table(names, [[_text(row[name]) for name in names] for row in rows]))


@app.command("unsilence")
def unsilence(context: typer.Context, silence: SilenceId) -> None:
    """End a silence now; what still fires is told."""
    from quantwatch.store.silences import lift_silence

    with Session.of(context).writer() as database, database.writer() as session:
        lift_silence(session, silence, who())
    say(f"silence {silence}: ended\n")


@app.command("close")
def close(
    context: typer.Context,
    alert: AlertId,
    reason: Annotated[str, typer.Option(help="Why, for the others.")],
) -> None:
    """Close an alert by hand; whoever was told of it is told of its end."""
    from quantwatch.pipeline.alerting import close_alert

    session = Session.of(context)
    config, _ = session.config()
    with session.writer() as database:
        close_alert(database, alert, who(), reason, config)
    say(f"alert {alert}: closed\n")


def _length(text: str) -> timedelta:
    from quantwatch.config.durations import seconds

    try:
        length = timedelta(seconds=seconds(text))
    except ValueError as error:
        raise UserError(f"--for: {error}") from None
    if not length:
        raise UserError(f"--for: {text!r} is not allowed; it must be longer than nothing")
    return length


def _rows(session: "DatabaseSession", alerts: "list[StoredAlert]") -> list[dict[str, Any]]:
    from quantwatch.store.silences import active_silences

    silences, unsteady = active_silences(session), _unsteady(session, alerts)
    return [_alert(alert, silences) | {"flapping": alert.id in unsteady} for alert in alerts]


def _unsteady(session: "DatabaseSession", alerts: "list[StoredAlert]") -> set[int]:
    """Return the alerts that flap, as their checks were applied."""
    from quantwatch.alerts.flapping import flapping, window
    from quantwatch.config.watching import FlappingConfig
    from quantwatch.store import clock, episodes
    from quantwatch.store.applied import applied_checks

    applied, now = applied_checks(session), clock.now(session)
    found: set[int] = set()
    for check in {alert.check for alert in alerts}:
        document = applied[check].config if check in applied else {}
        settings = document.get("alerting", {}).get("flapping", {})
        config = FlappingConfig.model_validate(settings)
        mine = [alert.id for alert in alerts if alert.check == check]
        found |= flapping(episodes.num_fired(session, mine, now - window(config)), config)
    return found


def _alert(alert: "StoredAlert", silences: "list[StoredSilence]") -> dict[str, Any]:
    from quantwatch.alerts.silences import matches

    episode = alert.episode
    by = next((s.id for s in silences if matches(s.matcher, alert.labels)), None)
    evidence = {} if episode is None else episode.evidence
    return {
        "id": alert.id,
        "check": alert.check,
        "candidate": alert.candidate or None,
        "rule": alert.rule,
        "state": alert.state,
        "episode": alert.episode_id,
        "severity": alert.severity,
        "since": episode and episode.opened_at.isoformat(timespec="seconds"),
        "fired_at": episode and episode.fired_at and episode.fired_at.isoformat(timespec="seconds"),
        "value": evidence.get("value"),
        "value_kind": evidence.get("value_kind"),
        "threshold": evidence.get("threshold"),
        "words": evidence.get("words"),
        "first_run": episode and episode.first_run_id,
        "last_run": episode and episode.last_run_id,
        "told": [] if episode is None else list(episode.told),
        "acked_by": episode and episode.acked_by,
        "ack_comment": episode and episode.ack_comment,
        "silenced_by": by,
        "awaits_confirmation_of": alert.awaits_run_id,
    }


def _line(row: dict[str, Any]) -> list[str]:
    notes = {
        "acknowledged by {}": row["acked_by"],
        "silence {}": row["silenced_by"],
        "confirms {}": row["awaits_confirmation_of"],
        "flapping": row["flapping"] or None,
    }
    note = ", ".join(words.format(value) for words, value in notes.items() if value is not None)
    return [_text({**row, "note": note or None}[name]) for name in _COLUMNS]


def _silence(silence: "StoredSilence") -> dict[str, Any]:
    return {
        "id": silence.id,
        "matcher": dict(silence.matcher),
        "starts_at": silence.starts_at.isoformat(timespec="seconds"),
        "ends_at": silence.ends_at.isoformat(timespec="seconds"),
        "author": silence.author,
        "comment": silence.comment,
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={glob}" for name, glob in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)
