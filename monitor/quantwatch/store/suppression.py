"""What need not be told any more, because it was resolved before anybody heard of it."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

WAITING = ("pending", "retry_wait")
"""States of a delivery that nobody holds."""
IN_FLIGHT = ("sending", "grouped")
RESOLVED, UPDATED = "alert.resolved", "alert.updated"
RESOLVING = (RESOLVED, UPDATED)
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
        ends_all=kind == RESOLVED and data.get("reason") == "resolved_all",
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
        one.left_machine
        or one.state in IN_FLIGHT
        or (one.state in WAITING and one.id not in pointless)
        for one in concerned
    )
    return bool(concerned) and not heard and not row.left_machine
