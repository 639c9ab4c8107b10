"""Who is silenced, and since when nothing may be told: overlays that never stop evaluation."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

from quantwatch.config.durations import seconds
from quantwatch.config.watching import MaintenanceConfig
from quantwatch.domain import Severity
from quantwatch.errors import UserError
from quantwatch.schedules import Cron, Window

LABELS = ("check", "candidate", "rule", "severity")
"""What a silence may match on."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Globs by label, all of which must match, for a time."""

    matcher: Mapping[str, str]
    starts_at: datetime
    ends_at: datetime

    def mutes(self, labels: Mapping[str, str], at: datetime) -> bool:
        """Say whether an alert with these labels is silenced at an instant."""
        return self.starts_at <= at < self.ends_at and matches(self.matcher, labels)


def is_silenced(silences: Iterable[Silence], labels: Mapping[str, str], at: datetime) -> bool:
    """Say whether any of the silences holds."""
    return any(silence.mutes(labels, at) for silence in silences)


def matches(matcher: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Say whether every glob of a matcher fits its label. Case matters."""
    return all(fnmatchcase(labels[label], glob) for label, glob in matcher.items())


def checked_matcher(given: Mapping[str, str | None]) -> dict[str, str]:
    """Return the globs that were given.

    Raises UserError on none at all, which would silence everything by an oversight, on labels
    that no alert has, and on a glob that no severity can match.
    """
    if unknown := sorted(given.keys() - set(LABELS)):
        raise UserError(f"no alert has a label {unknown[0]!r}; allowed: {', '.join(LABELS)}")
    matcher = {label: glob for label, glob in given.items() if glob}
    if not matcher:
        named = ", ".join(f"--{label}" for label in LABELS)
        raise UserError(f"a silence needs at least one of {named}; '*' matches everything")
    severity = matcher.get("severity", "*")
    if not any(fnmatchcase(known, severity) for known in Severity):
        allowed = ", ".join(Severity)
        raise UserError(f"severity {severity!r} matches nothing; allowed: {allowed}, or a glob")
    return matcher


def idle_globs(matcher: Mapping[str, str], known: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Return the globs that match nothing known so far; labels that `known` lacks aren't asked."""
    return {
        label: glob
        for label, glob in matcher.items()
        if label in known and not any(fnmatchcase(name, glob) for name in known[label])
    }


def in_maintenance(windows: Iterable[MaintenanceConfig], at: datetime) -> bool:
    """Say whether an instant lies in a maintenance window."""
    return any(
        at in Window(Cron(window.cron, window.zone), timedelta(seconds=seconds(window.length)))
        for window in windows
    )
