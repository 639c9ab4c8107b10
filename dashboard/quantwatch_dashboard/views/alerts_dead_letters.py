"""Dead letters: what was given up, and how it is replayed, one or all."""

from datetime import timedelta

import streamlit as st

from quantwatch.config.durations import seconds
from quantwatch.errors import UserError
from quantwatch.store.dead_letters import Delivery
from quantwatch.store.replays import Replayed
from quantwatch_dashboard import actions, clock, text
from quantwatch_dashboard.components import address, answers, asking, page
from quantwatch_dashboard.components.alerts_endpoints import delivery_table
from quantwatch_dashboard.queries import alerts as alert_queries
from quantwatch_dashboard.roles import Person, Role
from quantwatch_dashboard.text import ANY

_ONE, _ALL = "replay-one", "replay-all"
_SINCE = ("24h", "1h", "7d", "30d")


def show(url: str, endpoint: str | None, total: int) -> None:
    """Show the newest of `total` dead letters of one endpoint, or of all; with buttons."""
    found = alert_queries.deliveries(url, "dead", endpoint)
    said = "Given up after the last try, or because the endpoint is disabled."
    if total > len(found) > 0:
        said += f" The newest {len(found)} of {total:,}; older ones are replayed all at once."
    page.section("Dead letters", said)
    answers.show("letters", [_ONE, _ALL] if found else [])
    if not found:
        page.say("There is no dead letter.")
        return
    st.html(delivery_table(found, clock.now(), clock.zone()))
    left, right = st.columns([3, 2], gap="large", vertical_alignment="bottom")
    with left:
        _replay_one(found)
    with right:
        _offer_all(endpoint)


def _replay_one(found: tuple[Delivery, ...]) -> None:
    letters = {one.event_id: one for one in found}
    address.choose(
        "Dead letter", "event", list(letters), lambda i: _letter(letters[i]), 600, moves=True
    )
    asking.button(
        "Replay",
        lambda who: actions.replay(who, address.chosen_now("event")),
        key=_ONE,
        done=lambda count: f"{_waiting(count)}." if count else "It is pending already.",
    )


def _offer_all(endpoint: str | None) -> None:
    whose = "every endpoint" if endpoint is None else "this endpoint"
    since = address.choose("All that died in the last", "since", _SINCE)
    asking.button(
        f"Replay all of {whose}",
        lambda who: _replay_all(who, since, endpoint),
        key=_ALL,
        needs=Role.ADMIN,
        ask=f"What became a dead letter in the last {since} is sent to {whose} again; what is over "
        "by now is left out.",
        done=_replayed,
    )


def _replay_all(who: Person, since: str, endpoint: str | None) -> Replayed:
    """Replay all as it was asked. Raises UserError when another choice was made since."""
    chosen = address.chosen_now("since"), address.chosen_now("endpoint")
    if chosen != (since, endpoint or ANY):
        raise UserError("Another choice was made after the question; nothing was replayed.")
    return actions.replay_dead(who, timedelta(seconds=seconds(since)), endpoint)


def _replayed(found: object) -> str:
    assert isinstance(found, Replayed)
    over = f"; {found.over} left out: over by now" if found.over else ""
    return f"{_waiting(found.waiting)}{over}."


def _waiting(count: object) -> str:
    return "1 delivery is pending again" if count == 1 else f"{count} deliveries are pending again"


def _letter(one: Delivery) -> str:
    died = "" if one.ended_at is None else f" · {text.age(one.ended_at, clock.now())}"
    return f"{one.type} · {one.subject} · to {one.endpoint}{died} · {text.short_id(one.event_id)}"
