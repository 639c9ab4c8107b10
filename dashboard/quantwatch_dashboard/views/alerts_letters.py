"""Dead letters: what was given up, and how it is told again, one or all."""

from datetime import timedelta

import streamlit as st

from quantwatch.config.durations import seconds
from quantwatch.errors import UserError
from quantwatch.store.dead_letters import Delivery
from quantwatch.store.replays import Replayed
from quantwatch_dashboard import actions, clock, text
from quantwatch_dashboard.components import asking, filters, page
from quantwatch_dashboard.components.alerts_endpoints import delivery_table
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.queries import alerts as alert_queries
from quantwatch_dashboard.roles import Person, Role

_ONE, _ALL = "replay-one", "replay-all"
_SINCE = ("24h", "1h", "7d", "30d")


def show(url: str, endpoint: str | None, total: int) -> None:
    """Show the newest of `total` dead letters of one endpoint, or of all; with buttons."""
    found = alert_queries.deliveries(url, "dead", endpoint)
    said = "Given up after the last try, or because the endpoint is disabled."
    if total > len(found) > 0:
        said += f" The newest {len(found)} of {total:,}; older ones are told again all at once."
    page.section("Dead letters", said)
    if not found:
        st.html(tag("p", "None.", class_="qw-soft"))
        # The buttons are gone with what they told again; what came of it is not.
        asking.show_said(_ONE)
        asking.show_said(_ALL)
        return
    st.html(delivery_table(found, clock.now(), clock.zone()))
    left, right = st.columns([3, 2], gap="large", vertical_alignment="bottom")
    with left:
        _tell_one(found)
    with right:
        _tell_all(endpoint)


def _tell_one(found: tuple[Delivery, ...]) -> None:
    letters = {one.event_id: one for one in found}
    filters.choose(
        "Dead letter", "event", list(letters), lambda i: _letter(letters[i]), 600, moves=True
    )
    asking.button(
        "Tell it again",
        lambda who: actions.replay(who, filters.chosen_now("event")),
        key=_ONE,
        done=lambda count: f"{_waiting(count)}." if count else "It waits already.",
    )


def _tell_all(endpoint: str | None) -> None:
    whose = "every endpoint" if endpoint is None else "this endpoint"
    since = filters.choose("All that died in the last", "since", _SINCE)
    asking.button(
        f"Tell all of {whose} again",
        lambda who: _replay_all(who, since, endpoint),
        key=_ALL,
        needs=Role.ADMIN,
        ask=f"What became a dead letter in the last {since} is sent to {whose} again; what is over "
        "by now is left out.",
        done=_replayed,
    )


def _replay_all(who: Person, since: str, endpoint: str | None) -> Replayed:
    """Tell all again as it was asked. Raises UserError when another choice was made since."""
    chosen = filters.chosen_now("since"), filters.chosen_now("endpoint")
    if chosen != (since, endpoint or filters.ANY):
        raise UserError("Another choice was made after the question; nothing was told again.")
    return actions.replay_dead(who, timedelta(seconds=seconds(since)), endpoint)


def _replayed(found: object) -> str:
    assert isinstance(found, Replayed)
    over = f"; {found.over} left out: over by now" if found.over else ""
    return f"{_waiting(found.waiting)}{over}."


def _waiting(count: object) -> str:
    return "1 delivery waits again" if count == 1 else f"{count} deliveries wait again"


def _letter(one: Delivery) -> str:
    died = "" if one.ended_at is None else f" · {text.age(one.ended_at, clock.now())}"
    return f"{one.type} · {one.subject} · to {one.endpoint}{died} · …{one.event_id[-6:]}"
