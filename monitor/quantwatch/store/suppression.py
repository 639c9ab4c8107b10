"""What need not be told (any more, or again): its end came before anybody heard of it, or after."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

WAITING = ("pending", "retry_wait")
"""States of a delivery that nobody holds."""
IN_FLIGHT = ("sending", "grouped")
OPEN = (*WAITING, *IN_FLIGHT)
"""States of a delivery that has not ended."""
RESOLVED, UPDATED, RECOVERED = "alert.resolved", "alert.updated", "endpoint.recovered"
CLOSING = (RESOLVED, RECOVERED)
RESOLVING = (*CLOSING, UPDATED)
"""Types that tell the end of all of a group, or of some of it."""


@dataclass(frozen=True, slots=True)
class Told:
    """One delivery of a subject to an endpoint: its state, and which episodes it is about."""

    id: int
    state: str
    left_machine: bool
    """Whether the receiver may have got it."""
    type: str
    episodes: frozenset[str]
    complete: bool
    """Whether `episodes` names all of them."""
    ends_all: bool = False
    """Whether it resolves everything that the receiver knows of the subject."""

    @property
    def resolves(self) -> bool:
        """Whether it tells the end of something."""
        return self.type in RESOLVING

    @property
    def may_be_known(self) -> bool:
        """Whether the receiver may have heard of it, or hears of it just now."""
        return self.left_machine or self.state in IN_FLIGHT

    def is_about(self, other: "Told") -> bool:
        """Whether both are, or may be, about one episode."""
        if self.ends_all or not (self.complete and other.complete):
            return True
        return bool(self.episodes & other.episodes)

    def covers(self, other: "Told") -> bool:
        """Whether nothing that the other tells is still true after this one."""
        return self.ends_all or (other.complete and other.episodes <= self.episodes)


def told(delivery_id: int, state: str, *, left_machine: bool, event: tuple[str, bytes]) -> Told:
    """Read from an event (type, body) what the rule needs."""
    kind, body = event
    data = json.loads(body).get("data") or {}
    alerts = data.get("alerts") or []
    return Told(
        id=delivery_id,
        state=state,
        left_machine=left_machine,
        type=kind,
        episodes=frozenset(str(alert.get("episode")) for alert in alerts),
        complete=not data.get("more_alerts"),
        ends_all=kind == RECOVERED or (kind == RESOLVED and data.get("reason") == "resolved_all"),
    )


def suppressed(rows: Sequence[Told]) -> set[int]:
    """Return which deliveries of one subject to one endpoint, in their order, are pointless.

    What waits and is resolved by a later one that waits is not told. The later one is not told
    either when nothing that it ends was, or will be. Without a trace of an earlier one it is told.
    """
    pairs = [(row, _before(rows[:place])) for place, row in enumerate(rows)]
    ending = [(row, before) for row, before in pairs if row.resolves and row.state in WAITING]
    pointless = {
        one.id
        for row, before in ending
        for one in before
        if one.state in WAITING and row.covers(one)
    }
    return pointless | {row.id for row, before in ending if _never_told(row, before, pointless)}


def told_again(rows: Sequence[Told], chosen: Collection[int], *, again: bool) -> set[int]:
    """Return what is told when `chosen` ones of a subject, in its order, are told again.

    A beginning brings its end with it. It is left out when its end was heard (unless `again`), or
    when something that began after the end was: that end would be taken for the end of this.
    So is an end of which nothing was, or will be, heard.
    """
    found: set[int] = set()
    places = [place for place, row in enumerate(rows) if row.id in chosen]
    for place in sorted(places, key=lambda place: rows[place].resolves):
        row = rows[place]
        if not (row.resolves and _is_news(row, _before(rows[:place]), found)):
            found |= _with_its_end(rows, place, again=again)
    return found


def _with_its_end(rows: Sequence[Told], place: int, *, again: bool) -> set[int]:
    """Return a delivery and the end of what it tells; nothing when it must not be told."""
    row, later = rows[place], rows[place + 1 :]
    if row.type in CLOSING:
        overtaken = any(one.may_be_known for one in later if not one.resolves)
        return set() if overtaken else {row.id}
    ends = (at for at, one in enumerate(later, place + 1) if one.resolves and one.covers(row))
    end = next(ends, None)
    if end is None:
        return {row.id}
    if rows[end].may_be_known and not again:
        return set()
    rest = _with_its_end(rows, end, again=again)
    return rest and {row.id} | rest


def _is_news(row: Told, before: Sequence[Told], again: Collection[int]) -> bool:
    """Whether nothing that it ends was told, or waits, or is told again."""
    concerned = [one for one in before if row.is_about(one)]
    known = any(one.may_be_known or one.state in WAITING or one.id in again for one in concerned)
    return bool(concerned) and not known and not row.left_machine


def _before(rows: Sequence[Told]) -> list[Told]:
    """Return what was told since everything was resolved last."""
    found: list[Told] = []
    for row in rows:
        if row.ends_all:
            found = []
        elif not row.resolves:
            found.append(row)
    return found


def _never_told(row: Told, before: Sequence[Told], pointless: Collection[int]) -> bool:
    concerned = [one for one in before if row.is_about(one)]
    heard = any(
        one.may_be_known or (one.state in WAITING and one.id not in pointless) for one in concerned
    )
    return bool(concerned) and not heard and not row.left_machine
