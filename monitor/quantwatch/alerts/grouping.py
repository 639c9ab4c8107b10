"""Who is told what: one message per direction and group, to those whom it concerns.

A group is a check and a candidate. An endpoint hears of the members that it wants to know about,
and of the end of exactly those that it was told of.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeVar


class Change(StrEnum):
    """What is told of one alert."""

    FIRED = "fired"
    ESCALATED = "escalated"
    SILENCE_EXPIRED = "silence_expired"
    REMINDER = "reminder"
    RESOLVED = "resolved"


Reason = Literal[
    "first",
    "new_members",
    "escalated",
    "reminder",
    "resolved_all",
    "resolved_some",
    "silence_expired",
]
_K = TypeVar("_K", bound=Hashable)
_TYPES = {
    "escalated": "alert.escalated",
    "reminder": "alert.reminder",
    "resolved_all": "alert.resolved",
    # `alert.resolved` closes the group for its receiver (store.outbox).
    "resolved_some": "alert.updated",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One message: the endpoints that get it, the alerts it names, why it is sent."""

    endpoints: tuple[str, ...]
    members: tuple[int, ...]
    reason: Reason
    num_open: int
    """Alerts of the group that the receiver knows to fire, once it has read this."""

    @property
    def type(self) -> str:
        """Return the event's type."""
        return _TYPES.get(self.reason, "alert.firing")


def messages(
    changes: Mapping[int, Change],
    audience: Mapping[int, Sequence[str]],
    told_before: Mapping[str, frozenset[int]],
) -> tuple[Message, ...]:
    """Return the messages on alerts of one group that changed in the same direction.

    `audience` names each alert's endpoints, `told_before` the other open alerts of the group that
    an endpoint knows of. Endpoints that hear the same share a message.
    """
    heard: dict[str, list[int]] = {}
    for member in changes:
        for endpoint in audience.get(member, ()):
            heard.setdefault(endpoint, []).append(member)
    content = {
        endpoint: _content(changes, members, told_before.get(endpoint, frozenset()))
        for endpoint, members in heard.items()
    }
    return tuple(Message(names, *said) for said, names in _inverted(content).items())


def _content(
    changes: Mapping[int, Change], members: Sequence[int], others: frozenset[int]
) -> tuple[tuple[int, ...], Reason, int]:
    """Return what one endpoint is told: members, reason, how many fire."""
    found = {changes[member] for member in members}
    left = len(others) if Change.RESOLVED in found else len(others.union(members))
    return tuple(members), _reason(found, others), left


def _reason(found: set[Change], others: frozenset[int]) -> Reason:
    if Change.RESOLVED in found:
        return "resolved_some" if others else "resolved_all"
    if Change.FIRED in found:
        return "new_members" if others else "first"
    if Change.ESCALATED in found:
        return "escalated"
    return "silence_expired" if Change.SILENCE_EXPIRED in found else "reminder"


def _inverted(of: Mapping[str, _K]) -> dict[_K, tuple[str, ...]]:
    """Return the keys of each value."""
    found: dict[_K, tuple[str, ...]] = {}
    for key, value in of.items():
        found[value] = (*found.get(value, ()), key)
    return found
