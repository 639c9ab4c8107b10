"""Episodes of alerts as the page shows them: who knows, what keeps them quiet, address. Pure."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantwatch.alerts.silences import matches
from quantwatch.store.alert_history import ENDED, Listed
from quantwatch.store.backlog import Addressed
from quantwatch.store.dead_letters import DEAD, DELIVERED
from quantwatch.store.silences import StoredSilence
from quantwatch_dashboard import text

_ORDER = ("firing", "recovering", "pending", ENDED)


@dataclass(frozen=True, slots=True)
class Receiver:
    """An endpoint that was to be told. `state` is dead, waiting, told or unknown."""

    name: str
    state: str


@dataclass(frozen=True, slots=True)
class ShownEpisode:
    """An episode with all that is said about it at a glance."""

    listed: Listed
    receivers: tuple[Receiver, ...] = ()
    silence: StoredSilence | None = None
    """That keeps it from being told now."""
    in_maintenance: bool = False
    is_flapping: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.listed.state != ENDED

    @property
    def order(self) -> tuple[int, int, bool, float]:
        """Sort key: what fires and is critical first, what nobody acknowledged before the rest."""
        listed, episode = self.listed, self.listed.episode
        place = _ORDER.index(listed.state) if listed.state in _ORDER else len(_ORDER)
        mild = episode.severity != "critical"
        return place, int(mild), episode.acked_by is not None, -episode.opened_at.timestamp()


@dataclass(frozen=True, slots=True)
class Overlay:
    """What lies over all alerts at one moment."""

    silences: Sequence[StoredSilence] = ()
    maintenance: frozenset[str] = frozenset()
    """Checks in a maintenance window."""
    flapping: frozenset[int] = frozenset()
    """Numbers of alerts that come and go."""
    addressed: Sequence[Addressed] = ()


def shown(listed: Iterable[Listed], over: Overlay) -> tuple[ShownEpisode, ...]:
    """Return open episodes with what lies over them, worst first."""
    by_subject: dict[str, list[Addressed]] = defaultdict(list)
    for each in over.addressed:
        by_subject[each.subject].append(each)
    found = [
        ShownEpisode(
            one,
            receivers(one, by_subject.get(one.subject, ())),
            next((s for s in over.silences if matches(s.matcher, one.labels)), None),
            one.check in over.maintenance,
            one.alert_id in over.flapping,
        )
        for one in listed
    ]
    return tuple(sorted(found, key=lambda one: one.order))


def receivers(listed: Listed, addressed: Iterable[Addressed]) -> tuple[Receiver, ...]:
    """Return the endpoints that were to be told of an episode, and the worst that came of it.

    `addressed` is what there is on the episode's subject. One dead letter outweighs what waits,
    and only what was delivered is told: what is not known any more is unknown.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for one in addressed:
        if one.created_at >= listed.episode.opened_at:
            found[one.endpoint].add(one.state)
    return tuple(Receiver(name, _worst(found[name])) for name in listed.episode.told)


def _worst(states: Collection[str]) -> str:
    if DEAD in states:
        return "dead"
    if not states:
        return "unknown"
    return "told" if set(states) == {DELIVERED} else "waiting"


STATES: Mapping[str, tuple[str, Callable[[ShownEpisode], bool]]] = {
    "all": ("open and ended", lambda _: True),
    "open": ("open", lambda one: one.is_open),
    "firing": ("firing", lambda one: one.listed.state == "firing"),
    "recovering": ("recovering", lambda one: one.listed.state == "recovering"),
    "pending": ("pending", lambda one: one.listed.state == "pending"),
    "unacknowledged": (
        "firing, unacknowledged",
        lambda one: one.listed.state == "firing" and one.listed.episode.acked_by is None,
    ),
    "acknowledged": (
        "acknowledged",
        lambda one: one.is_open and one.listed.episode.acked_by is not None,
    ),
    "quiet": (
        "silenced or in maintenance",
        lambda one: one.silence is not None or one.in_maintenance,
    ),
    "ended": ("ended", lambda one: not one.is_open),
}
"""Filter → how it is called, and what passes it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the reader filters by; None is any."""

    check: str | None = None
    state: str = "all"
    severity: str | None = None
    words: str = ""

    @property
    def is_narrow(self) -> bool:
        """Whether anything is left out."""
        return self != Wanted()


def filtered(found: Iterable[ShownEpisode], wanted: Wanted) -> tuple[ShownEpisode, ...]:
    """Return what passes all filters, in the same order. Every one of the words must occur."""
    words = wanted.words.casefold().split()
    passes = STATES[wanted.state][1]
    return tuple(
        one
        for one in found
        if wanted.check in (None, one.listed.check)
        and wanted.severity in (None, one.listed.episode.severity)
        and passes(one)
        and all(word in _text(one.listed) for word in words)
    )


def _text(listed: Listed) -> str:
    episode = listed.episode
    evidence = episode.evidence
    known = (evidence.get(name) for name in ("words", "scope", "metric", "culprit"))
    own = (listed.check, listed.candidate, listed.rule, episode.id, episode.severity)
    people = (episode.acked_by, episode.ack_comment, *episode.told)
    return " ".join(str(each) for each in (*own, *known, *people) if each).casefold()


def would_match(matcher: Mapping[str, str], listed: Iterable[Listed]) -> list[Listed]:
    """Return what a silence would match of what is open.

    Without any glob it matches nothing: such a silence is refused.
    """
    return [one for one in listed if matcher and matches(matcher, one.labels)]


def headline(found: Collection[ShownEpisode]) -> str:
    """Say the worst in a few words."""
    firing = [one for one in found if one.listed.state in ("firing", "recovering")]
    if not firing:
        waiting = sum(one.listed.state == "pending" for one in found)
        return f"{waiting} waiting to be confirmed" if waiting else "No open alert"
    alone = [one for one in firing if one.listed.episode.acked_by is None]
    counted = f"{text.plural(len(firing), 'alert')} open"
    return f"{counted}, {len(alone)} unacknowledged" if alone else f"{counted}, all acknowledged"
