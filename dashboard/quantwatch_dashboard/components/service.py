"""The service as it runs: figures at the top, its parts, the queue."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, tzinfo

import streamlit as st

from quantwatch.domain import Json, RunStatus, Verdict
from quantwatch.store.components import Seen
from quantwatch.store.slots import Slot
from quantwatch.store.states import UnendedRun
from quantwatch.store.timetables import Planned
from quantwatch_dashboard import text
from quantwatch_dashboard.components import progress, schedule
from quantwatch_dashboard.components.markup import Html, join, link, numbers, soft, table, tag
from quantwatch_dashboard.components.tiles import tile
from quantwatch_dashboard.components.tiles import tiles as row_of
from quantwatch_dashboard.components.verdict import pill, tone
from quantwatch_dashboard.logic import service_words
from quantwatch_dashboard.logic.marks import Mark
from quantwatch_dashboard.logic.service_words import Figure

_WELL = (Mark("✓", "Seen"), tone(Verdict.PASS))
_SILENT = (Mark("!", "Silent"), tone(Verdict.WARN))


def tiles(figures: Iterable[Figure]) -> Html:
    """Return the figures at the top; what somebody has to look at says so by sign and color."""
    return row_of(tile(_named(f), f.value, f.detail) for f in figures)


def _named(figure: Figure) -> Html:
    sign = pill(Mark("!", "Attention"), tone(Verdict.WARN)) if figure.bad else ""
    return tag("div", tag("span", figure.name), sign, class_="qw-spread")


def parts(found: Iterable[Seen], leader: str | None) -> Html:
    """Return one row per part of the service, newest seen first."""
    rows = (
        [
            tag("td", pill(*(_SILENT if service_words.is_silent(part) else _WELL))),
            tag("td", part.component.kind, class_="qw-name"),
            tag("td", part.component.id, _leads(part, leader), class_="qw-wrap"),
            f"{part.component.host}, process {part.component.pid}",
            tag("td", f"{text.passed(part.age.total_seconds())} ago", class_="qw-n"),
            tag("td", _details(part.details), class_="qw-text"),
        ]
        for part in found
    )
    headers = ["State", "Part", "Name", "Where", *numbers("Last seen"), "Details"]
    return table(headers, rows, "qw-ops")


def _leads(part: Seen, leader: str | None) -> Html:
    return tag("span", "leads", class_="qw-sub") if part.component.id == leader else Html("")


def _details(details: Json) -> Html:
    said = {key: value for key, value in details.items() if value is not None}
    # Seconds since 1970 tell nobody anything; how long ago it looked is at the top.
    said.pop("last_tick", None)
    if not said:
        return soft(text.NONE)
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
        line = f"{progress.stage(run)}{where}, queued {since}; {who}"
        parts = [head, tag("span", line, class_="qw-soft")]
    else:
        stage = tag("span", f"{progress.stage(run)}{where}; {who}", class_="qw-soft")
        beat = tag("span", "heartbeat ", progress.heartbeat(run, now))
        parts = [head, stage, tag("span", progress.bar(run)), beat]
    if run.cancel_requested_at is not None:
        asked = f"asked to stop {text.age(run.cancel_requested_at, now)}"
        parts.append(tag("span", asked, class_="qw-hot"))
    return tag("div", *parts, class_="qw-queued")


def row(name: str, words: str) -> Html:
    """Return one line with a name and what is the matter, beside which a button stands."""
    return tag("div", tag("b", name), tag("span", words, class_="qw-soft"), class_="qw-queued")


@contextmanager
def beside(line: Html) -> Iterator[None]:
    """Show a line; what is made in this context, a button, stands at its end."""
    words, button = st.columns([7, 1.3], vertical_alignment="center")
    with words:
        st.html(line)
    with button:
        yield


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
            tag("td", link(state.check, "check", check=state.check), class_="qw-name"),
            tag("td", schedule.next_slot(state, now, zone, busy=state.check in busy)),
            tag("td", schedule.words(state.timetable.settings), class_="qw-mono qw-small"),
            _last(state.timetable.last_slot_at, zone),
            tag("td", _remark(state, state.check in busy), class_="qw-text"),
        ]
        for state in found
    )
    return table(["Check", "Next run", "Schedule", "Last slot", "Remark"], rows, "qw-ops")


def _last(at: datetime | None, zone: tzinfo) -> str:
    return text.NONE if at is None else text.instant(at, zone)


def _remark(state: Planned, busy: bool) -> Html:
    if state.timetable.trouble:
        return tag("span", state.timetable.trouble, class_="qw-hot")
    words = "a run of it waits or is under way" if busy else ""
    return tag("span", words, class_="qw-soft")
