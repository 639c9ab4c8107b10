"""How far a run is, and how each try of it ended."""

from collections.abc import Sequence
from datetime import datetime, tzinfo

from quantwatch.store.attempts import Attempt
from quantwatch.store.states import UnendedRun
from quantwatch_dashboard import text
from quantwatch_dashboard.components import progress
from quantwatch_dashboard.components.facts import facts
from quantwatch_dashboard.components.markup import Html, table, tag


def card(run: UnendedRun, now: datetime, zone: tzinfo) -> Html:
    """Return a card with stage, progress, and how old what it says is."""
    stage = progress.stage(run)
    known = [
        ("started", f"{text.age(run.started_at, now)}, {text.instant(run.started_at, zone)}"),
        ("trigger", f"{run.trigger}{f' by {run.actor}' if run.actor else ''}"),
        ("attempt", str(run.attempt) if run.attempt else "none yet"),
        ("device", run.device or "not said"),
        ("heartbeat", progress.heartbeat(run, now)),
    ]
    if run.cancel_requested_at is not None:
        known.append(("cancelled", f"asked {text.age(run.cancel_requested_at, now)}"))
    head = tag("h2", stage[:1].upper() + stage[1:])
    asked = tag("p", f"As of {text.second(now, zone)}; asked again every few seconds.",
                class_="qw-soft qw-small")  # fmt: skip
    return tag("div", head, progress.bar(run), facts(known), asked, class_="qw-state qw-live",
               role="status")  # fmt: skip


def table_of(tries: Sequence[Attempt], now: datetime, zone: tzinfo) -> Html:
    """Return one row per attempt; what an attempt said is text, its lines kept."""
    headers = ["#", "Worker", "Started", "Took", "Ended", "Peak memory", "Reason and message"]
    return table(headers, (_row(attempt, now, zone) for attempt in tries), "qw-attempts")


def _row(attempt: Attempt, now: datetime, zone: tzinfo) -> list[object]:
    who = tag("span", f"{attempt.host}, process {attempt.pid}", class_="qw-sub")
    return [
        str(attempt.number),
        tag("td", attempt.worker, who, class_="qw-name"),
        tag("td", text.instant(attempt.started_at, zone)),
        text.took(attempt.started_at, attempt.ended_at or now),
        attempt.outcome or "under way",
        text.size(attempt.peak_memory_bytes),
        tag("td", _reason(attempt), class_="qw-text"),
    ]


def _reason(attempt: Attempt) -> Html:
    named = " · ".join(word for word in (attempt.reason_code, attempt.error_class) if word)
    head = tag("span", named, class_="qw-mono qw-small") if named else Html("")
    if not attempt.message:
        return tag("span", head, "" if named else text.NONE)
    lines = attempt.message.strip()
    said = tag("pre", text.readable(lines), class_="qw-code qw-mono")
    if lines.count("\n") > 6:
        first = lines.splitlines()[-1]
        folded = tag("details", tag("summary", f"{len(lines.splitlines())} lines"), said)
        return tag("span", head, tag("span", text.clip(first, 300), class_="qw-sub"), folded)
    return tag("span", head, said)
