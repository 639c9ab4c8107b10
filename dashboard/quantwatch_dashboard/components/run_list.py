"""A check's ended runs as rows, and what changed between them as words."""

from collections.abc import Mapping, Sequence
from datetime import datetime, tzinfo

from quantwatch.domain import Json
from quantwatch.store.marks import RunMark
from quantwatch_dashboard import text
from quantwatch_dashboard.components.markup import Html, join, run_link, soft, table, tag
from quantwatch_dashboard.components.verdict import badge
from quantwatch_dashboard.components.words import moment
from quantwatch_dashboard.logic.history import Change, change_words
from quantwatch_dashboard.logic.marks import TROUBLE

_HEADERS = ("Run", "Started", "Outcome", "Took", "Trigger", "Alerts", "Reason, or what changed")
_MOST_WORDS = 3


def run_rows(
    marks: Sequence[RunMark],
    changes: Mapping[str, Sequence[Change]],
    pinned: str | None,
    now: datetime,
    zone: tzinfo,
) -> Html:
    """Return one row per run in the given order; the baseline is marked."""
    rows = (_row(mark, changes.get(mark.run_id, ()), pinned, (now, zone)) for mark in marks)
    return table(_HEADERS, rows, "qw-runs")


def _row(
    mark: RunMark, changes: Sequence[Change], pinned: str | None, clock: tuple[datetime, tzinfo]
) -> list[object]:
    now, zone = clock
    star = tag("span", "baseline", class_="qw-chip qw-on") if mark.run_id == pinned else Html("")
    at = text.minute(mark.started_at, zone)
    return [
        tag("td", run_link(mark.run_id), " ", star,
            class_="qw-mono qw-small", title=mark.run_id),
        tag("td", at, tag("span", moment(mark.started_at, now, zone), class_="qw-sub")),
        tag("td", badge(mark.status, mark.verdict)),
        tag("td", text.took(mark.started_at, mark.finished_at)),
        tag("td", mark.trigger),
        tag("td", str(mark.num_alerts) if mark.num_alerts else text.NONE),
        tag("td", _why(mark, changes), class_="qw-text qw-small"),
    ]  # fmt: skip


def _why(mark: RunMark, changes: Sequence[Change]) -> Html:
    parts: list[object] = []
    if mark.status in TROUBLE:
        parts.append(tag("div", text.clip(mark.reason or "no reason was recorded", 240)))
    if mark.parent_run_id is not None:
        parts.append(tag("div", "follows ", run_link(mark.parent_run_id)))
    records = [(change, record) for change in changes for record in change.records]
    parts += [tag("div", changed_words(c, r), class_="qw-soft") for c, r in records[:_MOST_WORDS]]
    if more := text.more(len(records), _MOST_WORDS):
        told = join(tag("div", changed_words(c, r)) for c, r in records[_MOST_WORDS:])
        parts.append(tag("details", tag("summary", more), told))
    return join(parts) if parts else soft(text.NONE)


def changed_words(change: Change, record: Json) -> Html:
    """Return what changed, for whom, from what to what."""
    whose = "" if change.candidate is None else f"{change.candidate}: "
    return tag("span", tag("b", str(record["part"])), f" · {whose}{change_words(record)}")
