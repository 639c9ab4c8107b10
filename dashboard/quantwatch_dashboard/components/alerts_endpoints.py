"""Endpoints and deliveries as rows: what was told, what waits, what is lost."""

from collections.abc import Iterable, Sequence
from datetime import datetime, tzinfo

from quantwatch.domain import Verdict
from quantwatch.store.dead_letters import Delivery
from quantwatch.store.endpoints import EndpointState
from quantwatch.store.messages import Load
from quantwatch_dashboard import text
from quantwatch_dashboard.components.checks import moment
from quantwatch_dashboard.components.markup import Html, link, table, tag
from quantwatch_dashboard.components.verdict import Mark, pill, tone

_STATES = {
    "enabled": (Mark("✓", "Enabled"), Verdict.PASS, ""),
    "disabled_auto": (Mark("✕", "Disabled"), Verdict.REGRESSION, "after days without any success"),
    "disabled_gone": (Mark("✕", "Disabled"), Verdict.REGRESSION, "the receiver is gone (410)"),
    "invalid": (Mark("✕", "Refused"), Verdict.REGRESSION, "its address is not allowed"),
    "removed": (Mark("–", "Removed"), None, "no longer in the configuration"),
}  # fmt: skip
_DELIVERIES = {
    "delivered": Verdict.PASS, "dead": Verdict.REGRESSION, "retry_wait": Verdict.WARN,
}  # fmt: skip
_ICONS = {
    "delivered": "✓", "dead": "✕", "retry_wait": "!", "pending": "…", "sending": "…",
    "grouped": "…", "suppressed": "–", "cancelled": "–",
}  # fmt: skip
WORDS = {
    "delivered": "Delivered", "dead": "Dead letter", "retry_wait": "Waits for another try",
    "pending": "Waits", "sending": "Is being sent", "grouped": "In a digest",
    "suppressed": "Not sent: over", "cancelled": "Cancelled",
}  # fmt: skip
_NEVER = tag("span", "never", class_="qw-soft")


def endpoint_table(
    found: Iterable[tuple[EndpointState, Load]], now: datetime, zone: tzinfo
) -> Html:
    """Return one row per endpoint, in the given order."""
    headers = ("Endpoint", "State", "Last success", "Failing", "Waiting", "Dead letters")
    return table(headers, (_endpoint(*each, now, zone) for each in found), "qw-episodes")


def _endpoint(state: EndpointState, load: Load, now: datetime, zone: tzinfo) -> Sequence[object]:
    mark, verdict, usual = _STATES.get(state.state, (Mark("?", state.state), None, ""))
    why = state.reason or usual
    tried = state.last_attempt_at
    off = state.state not in ("enabled", "removed") and tried is not None
    since = (
        tag("span", "since ", moment(tried, now, zone), class_="qw-sub") if off and tried else ""
    )
    success = moment(state.last_success_at, now, zone) if state.last_success_at else _NEVER
    return [
        tag(
            "td", link(state.name, "alerts", show="deliveries", endpoint=state.name), class_="name"
        ),
        tag("td", pill(mark, tone(verdict)), tag("span", why, class_="qw-sub"), since),
        tag("td", success, data_label="Last success"),
        tag("td", *_failing(state, now, zone), data_label="Failing"),
        tag("td", *_waiting(load, now, zone), data_label="Waiting"),
        tag("td", *_dead(load, now, zone), class_="words", data_label="Dead letters"),
    ]


def _failing(state: EndpointState, now: datetime, zone: tzinfo) -> Iterable[object]:
    if state.failing_since is None:
        return ("no",)
    count = f"{state.num_failures} failed tries in a row"
    since = moment(state.failing_since, now, zone)
    return tag("span", "since ", since, class_="qw-hot"), tag("span", count, class_="qw-sub")


def _waiting(load: Load, now: datetime, zone: tzinfo) -> Iterable[object]:
    if not load.num_waiting or load.oldest_at is None:
        return ("none",)
    oldest = moment(load.oldest_at, now, zone)
    return str(load.num_waiting), tag("span", "oldest: ", oldest, class_="qw-sub")


def _dead(load: Load, now: datetime, zone: tzinfo) -> Iterable[object]:
    if not load.num_dead or load.died_at is None:
        return ("none",)
    count = tag("span", str(load.num_dead), class_="qw-hot")
    last = tag("span", "last: ", moment(load.died_at, now, zone), class_="qw-sub")
    error = tag("span", text.clip(load.last_error or "", 200), class_="qw-sub")
    return count, last, error


def delivery_table(found: Iterable[Delivery], now: datetime, zone: tzinfo) -> Html:
    """Return one row per message and endpoint, in the given order."""
    headers = ("State", "Message", "About", "Endpoint", "Tries", "Age", "Last answer")
    return table(headers, (_delivery(each, now, zone) for each in found), "qw-episodes")


def _delivery(one: Delivery, now: datetime, zone: tzinfo) -> Sequence[object]:
    mark = Mark(_ICONS.get(one.state, "?"), WORDS.get(one.state, one.state))
    waits = one.ended_at is None and one.state in ("pending", "retry_wait")
    due = tag("span", "next try ", text.until(one.next_at, now), class_="qw-sub") if waits else ""
    return [
        tag("td", pill(mark, tone(_DELIVERIES.get(one.state))), due),
        tag("td", one.type, tag("span", one.event_id, class_="qw-sub qw-mono")),
        tag("td", one.subject, class_="name"),
        tag("td", one.endpoint),
        tag("td", str(one.attempt), data_label="Tries"),
        tag("td", moment(one.created_at, now, zone), data_label="Age"),
        tag("td", *_answer(one), class_="words", data_label="Last answer"),
    ]


def _answer(one: Delivery) -> Iterable[object]:
    status = "" if one.last_status is None else f"status {one.last_status}"
    took = "" if one.duration_s is None else f"in {text.duration(one.duration_s)}"
    said = " ".join(word for word in (status, took) if word) or "–"
    error = text.clip(one.last_error or "", 300)
    return said, tag("span", error, class_="qw-sub") if error else ""
