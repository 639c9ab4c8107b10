"""A silence in words, and what a new one would match."""

from collections.abc import Sequence
from datetime import datetime, tzinfo

from quantwatch.alerts.silences import LABELS
from quantwatch.store.alert_history import Listed
from quantwatch.store.silences import StoredSilence
from quantwatch_dashboard import text
from quantwatch_dashboard.components.markup import Html, table, tag
from quantwatch_dashboard.components.words import moment

_MOST = 10


def silence(one: StoredSilence, num_open: int, now: datetime, zone: tzinfo) -> Html:
    """Return what a silence matches, whose it is, and when it ends."""
    globs = ", ".join(f"{label} = {glob}" for label, glob in one.matcher.items())
    ends = moment(one.ends_at, now, zone)
    matched = f" · matches {text.plural(num_open, 'open alert')}"
    who = f"{one.author}, {text.age(one.starts_at, now)}: {one.comment}"
    return tag(
        "div",
        tag("div", tag("b", f"Silence {one.id}"), " ends ", ends, matched),
        tag("div", globs, class_="qw-mono qw-small qw-wrap"),
        tag("div", who, class_="qw-soft qw-small qw-wrap"),
    )


def preview(hit: Sequence[Listed], num_open: int) -> Html:
    """Return what of the open alerts a silence would match."""
    if not hit:
        words = "Matches nothing that is open now; it would keep quiet what begins later."
        return tag("p", words, class_="qw-note")
    rows = [(one.check, one.candidate or text.NONE, one.rule, one.episode.severity) for one in hit]
    said = f"Would match {len(hit)} of {text.plural(num_open, 'open alert')}:"
    return tag(
        "div",
        tag("p", said, class_="qw-small"),
        table(LABELS, rows[:_MOST]),
        tag("p", text.more(len(hit), _MOST), class_="qw-soft qw-small"),
    )
