"""Endpoints and deliveries as rows: what was delivered, what waits, what is lost."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, tzinfo

from quantwatch.store.backlog import Load
from quantwatch.store.dead_letters import Delivery
from quantwatch.store.endpoints import EndpointState
from quantwatch_dashboard import text
from quantwatch_dashboard.components.markup import Html, link, numbers, table, tag
from quantwatch_dashboard.components.verdict import pill, tone
from quantwatch_dashboard.components.words import moment
from quantwatch_dashboard.logic import delivery_words
from quantwatch_dashboard.logic.marks import Mark

_NEVER = tag("span", "never", class_="qw-soft")


def endpoint_table(
    found: Iterable[tuple[EndpointState, Load]], now: datetime, zone: tzinfo
) -> Html:
    """Return one row per endpoint, in the given order."""
    headers = ("Endpoint", "State", "Last success", "Failing", "Waiting", "Dead letters")
    return table(headers, (_endpoint(*each, now, zone) for each in found), cards=headers[2:])


def _endpoint(state: EndpointState, load: Load, now: datetime, zone: tzinfo) -> Sequence[object]:
    look = delivery_words.endpoint(state.state, failing=state.failing_since is not None)
    why = text.readable(state.reason or delivery_words.usual_reason(state.state))
    tried = state.last_attempt_at
    off = delivery_words.can_be_enabled(state.state) and tried is not None
    since = (
        tag("span", "since ", moment(tried, now, zone), class_="qw-sub") if off and tried else ""
    )
    success = moment(state.last_success_at, now, zone) if state.last_success_at else _NEVER
    return [
        tag(
            "td",
            link(state.name, "alerts", show="deliveries", endpoint=state.name),
            class_="qw-name",
        ),
        tag("td", badge(look), tag("span", why, class_="qw-sub"), since),
        tag("td", success),
        tag("td", *_failing(state, now, zone)),
        tag("td", *_waiting(load, now, zone)),
        tag("td", *_dead(load, now, zone), class_="qw-text"),
    ]


def _failing(state: EndpointState, now: datetime, zone: tzinfo) -> Iterable[object]:
    if state.failing_since is None:
        return ("no",)
    failures = text.plural(state.num_failures, "consecutive failure")
    count = f"{failures}, rate {text.share(state.failure_ratio)}"
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


def badge(look: delivery_words.Look) -> Html:
    """Return icon and word of a state in its color."""
    return pill(Mark(look.icon, look.word), tone(look.color))


def counts(found: Mapping[str, int]) -> Html:
    """Return how many deliveries are in each state, the most first."""
    known = sorted(found.items(), key=lambda pair: -pair[1])
    rows = (
        [tag("td", badge(delivery_words.delivery(state))), tag("td", f"{num:,}", class_="qw-n")]
        for state, num in known
    )
    return table(["State", *numbers("Deliveries")], rows)


def delivery_table(found: Iterable[Delivery], now: datetime, zone: tzinfo) -> Html:
    """Return one row per message and endpoint, in the given order."""
    headers = ("State", "Message", "About", "Endpoint", "Tries", "Age", "Last answer")
    return table(headers, (_delivery(each, now, zone) for each in found), cards=headers[4:])


def _delivery(one: Delivery, now: datetime, zone: tzinfo) -> Sequence[object]:
    waits = one.ended_at is None and one.state in ("pending", "retry_wait")
    due = tag("span", "next try ", text.until(one.next_at, now), class_="qw-sub") if waits else ""
    return [
        tag("td", badge(delivery_words.delivery(one.state)), due),
        tag("td", one.type, tag("span", one.event_id, class_="qw-sub qw-mono")),
        tag("td", one.subject, class_="qw-name"),
        tag("td", one.endpoint),
        tag("td", str(one.attempt)),
        tag("td", moment(one.created_at, now, zone)),
        tag("td", *_answer(one), class_="qw-text"),
    ]


def _answer(one: Delivery) -> Iterable[object]:
    status = "" if one.last_status is None else f"status {one.last_status}"
    took = "" if one.duration_s is None else f"in {text.duration(one.duration_s)}"
    said = " ".join(word for word in (status, took) if word) or text.NONE
    error = text.clip(one.last_error or "", 300)
    return said, tag("span", error, class_="qw-sub") if error else ""
