"""What happened in one episode, in order: judged, notified, acknowledged, silenced. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from quantwatch.alerts.silences import matches
from quantwatch.report.numbers import Number
from quantwatch.store.alert_history import Judgement, Listed
from quantwatch.store.audit import AuditEntry
from quantwatch.store.silences import StoredSilence
from quantwatch.store.told import NO_MESSAGES, Messages, Sent
from quantwatch_dashboard import text

REASONS = {
    "recovered": "better than the leave limit for long enough",
    "rule_changed": "the rule was edited",
    "rule_deleted": "the rule, its candidate or the check is no longer configured",
    "series_missing": "it was not measured any more",
    "baseline_moved": "the baseline, or the reference, is another one",
    "manual": "closed by hand",
}
_TOLD = {
    "alert.firing": "Notified: firing",
    "alert.escalated": "Notified: escalated",
    "alert.reminder": "Notified: reminder",
    "alert.updated": "Notified: partly resolved",
    "alert.resolved": "Notified: resolved",
}


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that happened. `kind` gives icon and color, `run_id` a link."""

    at: datetime
    kind: str
    what: str
    detail: str = ""
    run_id: str | None = None
    sent: Sent | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    """What is known of an episode, from five tables."""

    judged: Sequence[Judgement] = ()
    sent: Messages = NO_MESSAGES
    audited: Sequence[AuditEntry] = ()
    silences: Sequence[StoredSilence] = ()


def story(listed: Listed, found: Sources, now: datetime) -> tuple[Moment, ...]:
    """Return what happened from the beginning to the end, or to now; oldest first."""
    moments = [
        *_began(listed),
        *_judged(listed, found.judged),
        *map(_told, found.sent.sent),
        *_left_out(found.sent),
        *_done(found.audited, listed),
        *_quiet(listed, found.silences, now),
        *_ended(listed),
    ]
    # What happens at one instant is told in the order above; sorting keeps it.
    return tuple(sorted(moments, key=lambda moment: moment.at))


def value_of(listed: Listed) -> float | None:
    """Return the value that breached: NaN and ±∞ as themselves, None where none is known."""
    evidence = listed.episode.evidence
    kind = evidence.get("value_kind")
    return None if kind is None else text.plain(Number(evidence.get("value"), str(kind)))


def _began(listed: Listed) -> Iterator[Moment]:
    episode = listed.episode
    words = str(episode.evidence.get("words") or "")
    if episode.fired_at == episode.opened_at:
        yield Moment(episode.opened_at, "fired", "Opened and fired", words, episode.first_run_id)
        return
    yield Moment(episode.opened_at, "opened", "Opened", words, episode.first_run_id)
    if episode.fired_at is not None:
        how = str(episode.evidence.get("confirmation") or "")
        yield Moment(episode.fired_at, "fired", "Fired", how)


def _judged(listed: Listed, judged: Sequence[Judgement]) -> Iterator[Moment]:
    """Yield the runs in which something turned: better than the leave limit, worse again."""
    fired = listed.episode.fired_at
    before = "breach"
    for one in judged:
        if fired is None or one.at <= fired or one.outcome not in ("breach", "clear", "missing"):
            continue
        if one.outcome != before:
            what, kind = _TURNS[one.outcome]
            yield Moment(one.at, kind, what, _against(one), one.run_id)
        before = one.outcome


_TURNS = {
    "clear": ("Recovering", "recovering"),
    "breach": ("Breached again", "again"),
    "missing": ("Not measured", "missing"),
}


def _against(one: Judgement) -> str:
    if one.value_kind == "missing":
        return "the run has no value for it"
    value = text.number(text.plain(Number(one.value, one.value_kind)))
    return value if one.threshold is None else f"{value}, limit {text.number(one.threshold)}"


def _told(sent: Sent) -> Moment:
    what = _TOLD.get(sent.type, sent.type)
    maybe = (
        "" if sent.is_certain else "the message counts more alerts than it names; it may be this"
    )
    return Moment(sent.at, "told", what, maybe, sent=sent)


def _left_out(found: Messages) -> Iterator[Moment]:
    """Yield where messages are left out: a gap must not look like silence."""
    if found.left_out_at is not None:
        what = f"{found.num_left_out:,} messages are not shown"
        yield Moment(found.left_out_at, "told", what, "on this or other episodes of the candidate")


def _done(audited: Iterable[AuditEntry], listed: Listed) -> Iterator[Moment]:
    """Yield what people did with it: acknowledged, closed."""
    episode, noted = listed.episode, False
    for entry in audited:
        over = episode.resolved_at is not None and entry.at > episode.resolved_at
        if entry.at < episode.opened_at or over:
            continue
        comment = str((entry.after or {}).get("comment") or "")
        if entry.action == "acknowledge":
            noted = True
            yield Moment(entry.at, "acked", f"Acknowledged by {entry.actor}", comment)
        elif entry.action == "close":
            yield Moment(entry.at, "acked", f"Closed by {entry.actor}", comment)
    if episode.acked_at is not None and not noted:
        said = episode.ack_comment or ""
        yield Moment(episode.acked_at, "acked", f"Acknowledged by {episode.acked_by}", said)


def _quiet(listed: Listed, silences: Iterable[StoredSilence], now: datetime) -> Iterator[Moment]:
    """Yield the silences that matched, and since when something waits for the end of one."""
    episode = listed.episode
    begin, end = episode.opened_at, episode.resolved_at or now
    for silence in silences:
        if not matches(silence.matcher, listed.labels):
            continue
        if silence.ends_at <= begin or silence.starts_at >= end:
            continue
        what = f"Silenced by {silence.author}"
        if silence.starts_at < begin:
            what = f"Under a silence of {silence.author}"
        yield Moment(max(silence.starts_at, begin), "silenced", what, silence.comment)
        if silence.ends_at < end:
            yield Moment(silence.ends_at, "unsilenced", f"Silence {silence.id} ended")
    if episode.muted_at is not None and episode.resolved_at is None:
        why = "because of a silence or a maintenance window"
        yield Moment(episode.muted_at, "silenced", "Muted", why)


def _ended(listed: Listed) -> Iterator[Moment]:
    episode = listed.episode
    if episode.resolved_at is None:
        return
    reason = episode.resolve_reason or ""
    words = REASONS.get(reason, reason)
    run = episode.last_run_id if reason in ("recovered", "series_missing") else None
    never = "" if episode.fired_at is not None else " before anybody was notified"
    yield Moment(episode.resolved_at, "ended", f"Ended{never}", words, run)
