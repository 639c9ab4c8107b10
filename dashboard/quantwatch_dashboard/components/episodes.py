"""Episodes as rows, and the chips that say who knows of one."""

from collections.abc import Iterable, Sequence
from datetime import datetime, tzinfo

from quantwatch.domain import Severity, Verdict
from quantwatch.report.numbers import Number
from quantwatch_dashboard import text
from quantwatch_dashboard.components.markup import Html, join, link, numbers, table, tag
from quantwatch_dashboard.components.verdict import pill, severity_badge, severity_tone, tone
from quantwatch_dashboard.components.words import moment
from quantwatch_dashboard.logic.episode_story import REASONS, value_of
from quantwatch_dashboard.logic.episodes import Receiver, ShownEpisode
from quantwatch_dashboard.logic.marks import Mark

_STATES = {
    "pending": Mark("…", "Pending"),
    "firing": Mark("●", "Firing"),
    "recovering": Mark("↘", "Recovering"),
    "ended": Mark("✓", "Ended"),
}
_RECEIVERS = {
    "told": ("✓", "qw-ok", "every message on it was delivered"),
    "waiting": ("…", "qw-wait", "a message on it is pending or being sent"),
    "dead": ("✕", "qw-bad", "a message on it could not be delivered: a dead letter"),
    "unknown": ("?", "qw-wait", "no message on it is known to have arrived"),
}


def open_table(found: Iterable[ShownEpisode], now: datetime, zone: tzinfo) -> Html:
    """Return one row per open episode, in the given order."""
    headers = ["Severity", "Alert", "Found", *numbers("Value"), "Who knows", ""]
    rows = (_open_row(one, now, zone) for one in found)
    return table(headers, rows, cards=("Value", "Who knows"))


def ended_table(found: Iterable[ShownEpisode], now: datetime, zone: tzinfo) -> Html:
    """Return one row per past episode, in the given order."""
    headers = ["Severity", "Alert", "Lasted", *numbers("Peak"), "Why it ended", ""]
    return table(headers, (_ended_row(one, now, zone) for one in found), cards=("Peak",))


def state_badge(one: ShownEpisode) -> Html:
    """Return icon and word of a state."""
    shown = _STATES.get(one.listed.state, Mark("?", one.listed.state))
    if one.listed.state == "firing":
        return pill(shown, severity_tone(severity_of(one)))
    return pill(shown, tone(Verdict.IMPROVEMENT if one.listed.state == "recovering" else None))


def severity_of(one: ShownEpisode) -> Severity:
    """Return the highest severity of an episode."""
    return Severity(one.listed.episode.severity)


def who_knows(one: ShownEpisode, now: datetime, zone: tzinfo) -> Html:
    """Return who acknowledged it, which endpoints have got it, and what keeps it quiet."""
    parts = [_acked(one, now, zone), _chips(one.receivers)]
    if not one.receivers:
        parts.append(tag("span", _nobody(one), class_="qw-sub"))
    elif one.listed.episode.reminded_at is not None:
        # Reminders are counted from the newest message, whichever that was: mostly the first one.
        told = moment(one.listed.episode.reminded_at, now, zone)
        parts.append(tag("span", "last told ", told, class_="qw-sub"))
    return join([*parts, *_overlays(one, now, zone)])


def number_against(value: float | None, threshold: object) -> str:
    """Return a value with the limit that it is beyond."""
    shown = text.or_dash(value)
    limit = threshold if isinstance(threshold, int | float) else None
    return shown if limit is None else f"{shown} (limit {text.number(float(limit))})"


def _open_row(one: ShownEpisode, now: datetime, zone: tzinfo) -> Sequence[object]:
    episode, evidence = one.listed.episode, one.listed.episode.evidence
    since = moment(episode.fired_at or episode.opened_at, now, zone)
    limit = evidence.get("threshold")
    threshold = "" if limit is None else f"limit {text.number(float(limit))}"
    value = value_of(one.listed)
    return [
        tag("td", severity_badge(severity_of(one)), tag("span", state_badge(one), class_="qw-sub")),
        tag("td", _name(one), _about(one), class_="qw-name"),
        tag("td", evidence.get("words") or "", tag("span", "since ", since, _runs(one),
            class_="qw-sub"), class_="qw-text"),
        tag("td", text.or_dash(value),
            tag("span", threshold, class_="qw-sub"), class_="qw-n qw-hot"),
        tag("td", who_knows(one, now, zone), class_="qw-text"),
        tag("td", _open(one), class_="qw-n"),
    ]  # fmt: skip


def _ended_row(one: ShownEpisode, now: datetime, zone: tzinfo) -> Sequence[object]:
    episode = one.listed.episode
    assert episode.resolved_at is not None, "only past episodes have an end"
    reason = str(episode.resolve_reason or "")
    told = ", ".join(episode.told) or "nobody"
    lasted = text.took(episode.opened_at, episode.resolved_at)
    peak = text.plain(Number(episode.peak_value, episode.peak_kind))
    ended = tag("span", "ended ", moment(episode.resolved_at, now, zone), class_="qw-sub")
    return [
        tag("td", severity_badge(severity_of(one))),
        tag("td", _name(one), _about(one), class_="qw-name"),
        tag("td", lasted, _runs(one), ended),
        tag("td", text.or_dash(peak), class_="qw-n"),
        tag("td", REASONS.get(reason, reason), tag("span", f"notified: {told}", class_="qw-sub"),
            class_="qw-text"),
        tag("td", _open(one), class_="qw-n"),
    ]  # fmt: skip


def _name(one: ShownEpisode) -> Html:
    return link(one.listed.rule, "alerts", episode=one.listed.episode.id)


def _about(one: ShownEpisode) -> Html:
    candidate = one.listed.candidate or "the check itself"
    flaps = tag("span", "flapping", class_="qw-chip qw-wait") if one.is_flapping else Html("")
    return tag("span", f"{one.listed.check} · {candidate} ", flaps, class_="qw-sub")


def _runs(one: ShownEpisode) -> Html:
    return tag("span", f" · {text.plural(one.listed.episode.num_runs, 'run')}")


def _open(one: ShownEpisode) -> Html:
    return link("Open →", "alerts", episode=one.listed.episode.id)


def _acked(one: ShownEpisode, now: datetime, zone: tzinfo) -> Html:
    episode = one.listed.episode
    if episode.acked_by is None:
        words = "unacknowledged" if one.listed.state in ("firing", "recovering") else ""
        return tag("div", words, class_="qw-soft") if words else Html("")
    when = moment(episode.acked_at, now, zone) if episode.acked_at else ""
    said = tag("span", episode.ack_comment or "", class_="qw-sub")
    return tag("div", "acknowledged by ", tag("b", episode.acked_by), ", ", when, said)


def _chips(receivers: Iterable[Receiver]) -> Html:
    chips = [_chip(receiver) for receiver in receivers]
    return tag("div", *chips, class_="qw-chips") if chips else Html("")


def _chip(receiver: Receiver) -> Html:
    icon, class_, words = _RECEIVERS[receiver.state]
    title = f"{receiver.name}: {words}"
    return tag("span", f"{icon} {receiver.name}", class_=f"qw-chip {class_}", title=title)


def _overlays(one: ShownEpisode, now: datetime, zone: tzinfo) -> list[Html]:
    found = []
    if one.silence is not None:
        said = f"silenced by {one.silence.author}, ends "
        found.append(tag("div", said, moment(one.silence.ends_at, now, zone), class_="qw-sub"))
    if one.in_maintenance:
        words = "in a maintenance window: nobody is notified"
        found.append(tag("div", words, class_="qw-sub"))
    return found


def _nobody(one: ShownEpisode) -> str:
    """Say why no endpoint was notified."""
    if one.listed.state == "pending":
        if one.listed.awaits_run_id is not None:
            return "nobody is notified before a second run confirms it"
        breached = text.plural(one.listed.num_breaches, "run")
        return f"nobody is notified yet: breached in {breached} so far"
    quiet = one.silence is not None or one.in_maintenance or one.listed.episode.muted_at is not None
    if quiet:
        return "no endpoint was notified: it is muted"
    return "no endpoint was notified: none is configured for it"
