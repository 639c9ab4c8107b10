"""Everything the dashboard writes: one function per action, thin over the store, all audited.

The person comes first and is the actor of the audit log. Doing something twice changes nothing the
second time: what was so already returns False (or what is there) and writes nothing. The database
is opened for writing only when there is something to write. Raises AccessError when the role is
too low, UserError and StoreError in sentences that can be shown.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta

from quantwatch.alerts.silences import checked_matcher
from quantwatch.errors import NotFoundError, UserError
from quantwatch.store import (
    applied,
    baselines,
    cancelling,
    checks,
    clock,
    endpoints,
    episodes,
    quarantine,
    replays,
    silences,
    triggers,
)
from quantwatch.store.queue import NewRun
from quantwatch.store.replays import Replayed
from quantwatch.store.session import Database
from quantwatch.store.silences import StoredSilence
from quantwatch.store.triggers import Triggered
from quantwatch_dashboard.queries import connection
from quantwatch_dashboard.queries.configured import configured
from quantwatch_dashboard.roles import AccessError, Person, Role

__all__ = [
    "AccessError",
    "acknowledge",
    "cancel_run",
    "enable_endpoint",
    "pause",
    "pin",
    "release",
    "replay",
    "replay_dead",
    "resume",
    "run_now",
    "silence",
    "unpin",
    "unsilence",
]

_SAME_PRESS = timedelta(minutes=1)
"""Two equal silences of one person within this time are one wish, pressed twice."""


def run_now(person: Person, check: str, key: str) -> Triggered:
    """Queue a run of a check as the service works with it; one key starts one run."""
    person.require(Role.OPERATOR, f"Running {check}")
    config, folder = configured(connection.url(), check)
    wanted = NewRun.of(check, config, folder, slot_key="")
    return triggers.trigger(_writable(), wanted, actor=person.name, key=key)


def cancel_run(person: Person, run_id: str) -> str:
    """Cancel a run that waits, or ask its worker to stop; return the run's state afterwards."""
    person.require(Role.OPERATOR, "Cancelling a run")
    status = cancelling.request_cancel(
        _writable(), run_id, actor=person.name, reason="on the dashboard"
    )
    return str(status.value)


def pause(person: Person, check: str, reason: str) -> bool:
    """Pause a check. False when it was paused already."""
    person.require(Role.OPERATOR, f"Pausing {check}")
    _require_known(check)
    if not reason.strip():
        raise UserError(f"{check} is not paused without a reason; say why.")
    return not _is_paused(check) and checks.pause(_writable(), check, person.name, reason.strip())


def resume(person: Person, check: str) -> bool:
    """Let a paused check run again. False when it was not paused."""
    person.require(Role.OPERATOR, f"Resuming {check}")
    _require_known(check)
    return _is_paused(check) and checks.resume(_writable(), check, person.name)


def pin(person: Person, check: str, run_id: str) -> bool:
    """Compare later runs of a check with a run. False when they are already."""
    person.require(Role.OPERATOR, "Pinning a baseline")
    if baselines.get_pinned(_readable(), check) == run_id:
        return False
    baselines.pin(_writable(), check, run_id, actor=person.name)
    return True


def unpin(person: Person, check: str) -> bool:
    """Leave a check without a pinned baseline. False when it has none."""
    person.require(Role.OPERATOR, "Unpinning a baseline")
    _require_known(check)
    if baselines.get_pinned(_readable(), check) is None:
        return False
    baselines.unpin(_writable(), check, actor=person.name)
    return True


def acknowledge(person: Person, alert_id: int, episode_id: str, comment: str) -> bool:
    """Say who acknowledges an alert. False when that person has said just that.

    Raises UserError when another episode than the one that the person has seen is open by now.
    """
    person.require(Role.OPERATOR, "Acknowledging an alert")
    said = comment.strip()
    if not said:
        raise UserError("An alert is not acknowledged without a comment; say what is being done.")
    with _readable().reader() as session:
        episode = episodes.get_alert(session, alert_id).episode
    mine = (episode_id, person.name, said)
    if episode is not None and (episode.id, episode.acked_by, episode.ack_comment) == mine:
        return False
    with _writable().writer() as session:
        episodes.acknowledge(session, alert_id, person.name, said, episode_id=episode_id)
    return True


def silence(
    person: Person, matcher: Mapping[str, str | None], length: timedelta, comment: str
) -> StoredSilence:
    """Notify nobody of matching alerts for a while; return the silence."""
    person.require(Role.OPERATOR, "Silencing alerts")
    if length <= timedelta():
        raise UserError("A silence must be longer than nothing.")
    if not comment.strip():
        raise UserError("A silence needs a comment: the others will ask why nobody told them.")
    if not any(matcher.values()):
        raise UserError("A silence needs at least one of check, candidate, rule and severity.")
    globs, said = checked_matcher(matcher), comment.strip()
    with _writable().writer() as session:
        since = clock.now(session) - _SAME_PRESS
        for known in silences.active_silences(session):
            mine = (known.author, known.comment, dict(known.matcher)) == (person.name, said, globs)
            if mine and known.ends_at - known.starts_at == length and known.starts_at > since:
                return known
        return silences.add_silence(session, globs, length, person.name, said)


def unsilence(person: Person, silence_id: int) -> bool:
    """End a silence now. False when it has ended already."""
    person.require(Role.OPERATOR, "Ending a silence")
    with _readable().reader() as session:
        if silences.has_ended(session, silence_id):
            return False
    with _writable().writer() as session:
        silences.lift_silence(session, silence_id, person.name)
    return True


def replay(person: Person, event_id: str) -> int:
    """Replay an event where it is a dead letter; return the number of deliveries.

    0 when it waits already.
    """
    person.require(Role.OPERATOR, "Replaying a message")
    if replays.waits(_readable(), event_id):
        return 0
    return replays.replay(_writable(), event_id, person.name)


def replay_dead(
    person: Person, since: datetime | timedelta, endpoint: str | None = None
) -> Replayed:
    """Replay everything, to one endpoint or to all, that became a dead letter since then."""
    person.require(Role.ADMIN, "Replaying all dead letters")
    return replays.replay_dead(_writable(), since, person.name, endpoint=endpoint)


def enable_endpoint(person: Person, name: str) -> bool:
    """Enable an endpoint that was disabled. False when it is enabled."""
    person.require(Role.ADMIN, f"Enabling endpoint {name}")
    states = {one.name: one.state for one in endpoints.list_endpoints(_readable())}
    if states.get(name) == applied.REMOVED:
        raise UserError(
            f"Endpoint {name} is no longer in the configuration; nothing is sent to it."
        )
    if states.get(name) == "enabled":
        return False
    endpoints.enable_endpoint(_writable(), name, person.name)
    return True


def release(person: Person, check: str) -> bool:
    """Let a check run again that is in quarantine. False when it isn't."""
    person.require(Role.ADMIN, f"Releasing {check} from quarantine")
    _require_known(check)
    with _readable().reader() as session:
        if quarantine.quarantined_since(session, check) is None:
            return False
    quarantine.lift_quarantine(_writable(), check, person.name)
    return True


def _is_paused(check: str) -> bool:
    with _readable().reader() as session:
        return check in checks.pauses(session)


def _require_known(check: str) -> None:
    with _readable().reader() as session:
        known = checks.known_checks(session)
    if check not in known:
        raise NotFoundError(f"There is no check {check!r} in this database.")


def _readable() -> Database:
    return connection.database(connection.url())


def _writable() -> Database:
    return connection.writable(connection.url())
