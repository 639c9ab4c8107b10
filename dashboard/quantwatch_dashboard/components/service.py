"""The service as it runs: figures at the top, its parts, the queue."""

import json
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, tzinfo

from quantwatch.domain import Json, RunStatus, Verdict
from quantwatch.store.components import Seen
from quantwatch.store.operations import Planned, Slot
from quantwatch.store.states import UnendedRun
from quantwatch_dashboard import service_words, text
from quantwatch_dashboard.components.markup import Html, join, link, table, tag
from quantwatch_dashboard.components.verdict import Mark, pill, tone
from quantwatch_dashboard.service_words import Figure

_WELL = (Mark("✓", "Seen"), tone(Verdict.PASS))
_SILENT = (Mark("!", "Silent"), tone(Verdict.WARN))


def tiles(figures: Iterable[Figure]) -> Html:
    """Return the figures at the top; what somebody has to look at says so by sign and color."""
    return tag("div", *map(_tile, figures), class_="qw-tiles")


def _tile(figure: Figure) -> Html:
    sign = pill(Mark("!", "look"), tone(Verdict.WARN)) if figure.bad else Html("")
    return tag(
        "div",
        tag("div", tag("span", figure.name), sign, class_="k qw-spread"),
        tag("div", figure.value, class_="v"),
        tag("div", figure.detail, class_="d"),
        class_="qw-tile",
    )


def parts(found: Iterable[Seen], leader: str | None) -> Html:
    """Return one row per part of the service, newest seen first."""
    rows = (
        [
            tag("td", pill(*(_SILENT if service_words.is_silent(part) else _WELL))),
            tag("td", part.component.kind, class_="name"),
            tag("td", part.component.id, _leads(part, leader), class_="qw-wrap"),
            f"{part.component.host}, process {part.component.pid}",
            tag("td", f"{service_words.seconds(part.age.total_seconds())} ago", class_="n"),
            tag("td", _details(part.details), class_="words"),
        ]
        for part in found
    )
    headers = ["State", "Part", "Name", "Where", tag("th", "Last seen", class_="n"), "It says"]
    return table(headers, rows, "qw-ops")


def _leads(part: Seen, leader: str | None) -> Html:
    return tag("span", "leads", class_="qw-sub") if part.component.id == leader else Html("")


def _details(details: Json) -> Html:
    said = {key: value for key, value in details.items() if value is not None}
    # Seconds since 1970 tell nobody anything; how long ago it looked is at the top.
    said.pop("last_tick", None)
    if not said:
        return tag("span", "–", class_="qw-soft")
    trouble = said.pop("config_trouble", None)
    lines = [
        tag("span", f"{key}: {_value(value)}", class_="qw-line") for key, value in said.items()
    ]
    if trouble:
        lines.append(tag("span", f"configuration: {trouble}", class_="qw-line qw-hot"))
    return join(lines)


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def run_row(run: UnendedRun, now: datetime) -> Html:
    """Return one line of the queue: what, how far, how old that is."""
    head = tag("b", link(run.check, "run", run=run.run_id))
    who = f"{run.trigger}{f' by {run.actor}' if run.actor else ''}"
    where = f" on {run.device}" if run.device else ""
    if run.status is RunStatus.QUEUED:
        since = text.age(run.queued_at or run.started_at, now)
        line = f"waits for a worker{where}, queued {since}; {who}"
        parts = [head, tag("span", line, class_="qw-soft")]
    else:
        stage = run.stage or run.status.value
        parts = [head, tag("span", f"{stage}{where}; {who}", class_="qw-soft"), _bar(run),
                 _beat(run, now)]  # fmt: skip
    if run.cancel_requested_at is not None:
        asked = f"asked to stop {text.age(run.cancel_requested_at, now)}"
        parts.append(tag("span", asked, class_="qw-hot"))
    return tag("div", *parts, class_="qw-queued")


def row(name: str, words: str) -> Html:
    """Return one line with a name and what is the matter, beside which a button stands."""
    return tag("div", tag("b", name), tag("span", words, class_="qw-soft"), class_="qw-queued")


def _bar(run: UnendedRun) -> Html:
    if not run.tokens_total:
        return tag("span", "how much there is to do is not known yet", class_="qw-soft")
    done = min(run.tokens_done, run.tokens_total)
    percent = 100 * done / run.tokens_total
    said = f"{done:,} of {run.tokens_total:,} tokens, {percent:.0f}\N{NO-BREAK SPACE}%"
    bar = tag(
        "span", tag("b", style=f"width: {percent:.1f}%"), class_="qw-progress", role="progressbar",
        aria_valuenow=f"{percent:.0f}", aria_valuemin="0", aria_valuemax="100", aria_label=said,
    )  # fmt: skip
    return join([bar, tag("span", said, class_="qw-soft")])


def _beat(run: UnendedRun, now: datetime) -> Html:
    if run.heartbeat_at is None:
        return tag("span", "no heartbeat yet", class_="qw-soft")
    old = (now - run.heartbeat_at).total_seconds()
    lost = run.lease_until is not None and run.lease_until < now
    words = f"heartbeat {service_words.seconds(old)} ago"
    if run.lease_until is not None and not lost:
        left = (run.lease_until - now).total_seconds()
        words += f"; its lease lasts {service_words.seconds(left)}"
    if lost:
        return tag("span", f"{words}; its lease has run out, so it will be taken back",
                   class_="qw-hot")  # fmt: skip
    return tag("span", words, class_="qw-soft")


def slots(found: Sequence[Slot]) -> Html:
    """Return which run holds which device."""
    words = (
        join([slot.device, " by ", link(slot.check, "run", run=slot.run_id)]) for slot in found
    )
    lines = (tag("span", line, class_="qw-line") for line in words)
    return tag("p", tag("b", "Devices in use"), *lines, class_="qw-small")


def timetable(found: Iterable[Planned], busy: Collection[str], now: datetime, zone: tzinfo) -> Html:
    """Return when each check runs next, or why it does not; `busy` ones have a run in the queue."""
    rows = (
        [
            tag("td", link(state.check, "check", check=state.check), class_="name"),
            tag("td", _next(state, now, zone)),
            tag("td", _rhythm(state.settings), class_="qw-mono qw-small"),
            "–" if state.last_slot_at is None else text.instant(state.last_slot_at, zone),
            tag("td", _remark(state, state.check in busy), class_="words"),
        ]
        for state in found
    )
    return table(["Check", "Next run", "Schedule", "Last slot", "Remark"], rows, "qw-ops")


def _next(state: Planned, now: datetime, zone: tzinfo) -> Html:
    if state.next_slot_at is None:
        return tag("span", "none", class_="qw-soft")
    ahead = (state.next_slot_at - now).total_seconds()
    said = f"in {service_words.seconds(ahead)}" if ahead > 0 else "due"
    return join([text.instant(state.next_slot_at, zone), tag("span", said, class_="qw-sub")])


def _rhythm(settings: Json) -> str:
    rhythm = settings.get("cron") or f"every {settings.get('every')}"
    return f"{rhythm} {settings.get('zone') or ''}".strip()


def _remark(state: Planned, busy: bool) -> Html:
    if state.trouble:
        return tag("span", state.trouble, class_="qw-hot")
    if state.quarantined_at is not None:
        return tag("span", "in quarantine", class_="qw-hot")
    if state.paused_at is not None:
        return tag("span", "paused")
    if busy:
        return tag("span", "a run of it waits or is under way", class_="qw-soft")
    waits = "no scheduler has looked at it since it was applied"
    return tag("span", "" if state.next_slot_at is not None else waits, class_="qw-soft")
