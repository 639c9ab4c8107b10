"""The message on alerts, version 1: strict JSON `{type, timestamp, data}`, less than 20 kB.

docs/webhooks.md lists the keys. Other formats are rendered from this document and nothing else.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from quantwatch.domain import Json, Severity
from quantwatch.observability.redaction import scrub, scrubbed
from quantwatch.report.numbers import Number, printable

VERSION = 1
MAX_BYTES = 20_000
_MOST = 10
"""Rules, scopes and changes that are named; the rest is counted."""
_WORDS = 300
_COMMAND = 1000
"""Letters of one text."""


@dataclass(frozen=True, slots=True)
class Member:
    """One alert that a message is about."""

    alert_id: int
    episode_id: str
    rule: str
    severity: Severity
    change: str
    """fired, escalated, silence_expired, reminder or resolved."""
    since: datetime
    first_run: str | None
    num_runs: int
    evidence: Json
    """What `evidence.evidence_of` found, with `now` once it is resolved."""
    peak: Number
    resolve_reason: str | None = None
    flapping: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """A message before it is written."""

    type: str
    reason: str
    check: str
    candidate: str
    moment: datetime
    members: Sequence[Member]
    num_open: int
    """Alerts of the group that the receiver knows to fire, once it has read this."""
    dashboard_url: str | None


def body(notice: Notice) -> dict[str, Any]:
    """Return the document. Texts are cut and lists counted until it is small enough."""
    for most, words in ((_MOST, _WORDS), (5, 150), (2, 80), (1, 60)):
        document = _document(notice, most, words)
        if len(json.dumps(document, allow_nan=False, ensure_ascii=False).encode()) < MAX_BYTES:
            return document
    raise ValueError(f"a message on {notice.check} does not fit into {MAX_BYTES} bytes")


def link(dashboard_url: str | None, run_id: str | None) -> str | None:
    """Return the address of the page on a run, or of the alerts when there is no run."""
    if dashboard_url is None:
        return None
    page = "alerts" if run_id is None else f"run?run={run_id}"
    return f"{dashboard_url.rstrip('/')}/{page}"


def _document(notice: Notice, most: int, words: int) -> dict[str, Any]:
    members = sorted(notice.members, key=_badness)
    named = [_member(member, notice.moment, words) for member in members[:most]]
    data = {
        "version": VERSION,
        "reason": notice.reason,
        "severity": _severity(members).value,
        "check": notice.check,
        "candidate": notice.candidate or None,
        "title": _cut(_title(notice, members), words),
        "alerts": named,
        "more_alerts": len(members) - len(named),
        "open_alerts": notice.num_open,
        "since": _instant(min(member.since for member in members)),
        "duration_s": _duration(notice, members),
        **_places(members, most, words),
        **_causes(notice, members[0].evidence, most, words),
    }
    return {"type": notice.type, "timestamp": _instant(notice.moment), "data": data}


def _places(members: Sequence[Member], most: int, words: int) -> dict[str, Any]:
    named = _worst_scopes(members)[:most]
    return {
        "scopes": [_cut_texts(scope, words) for scope in named],
        "more_scopes": _num_scopes(members) - len(named),
    }


def _causes(notice: Notice, worst: Json, most: int, words: int) -> dict[str, Any]:
    """Return whose fault it is, what changed, and where to go on: of the worst alert."""
    run_id = (worst.get("now") or worst).get("run")
    changed = worst.get("changed", [])
    return {
        "run": run_id,
        "culprit": _cut(worst.get("culprit"), words),
        "baseline": worst.get("baseline"),
        "drift": _cut(worst.get("drift"), words),
        "changed": [_cut_texts(change, words) for change in changed[:most]],
        "more_changed": worst.get("more_changed", 0) + max(0, len(changed) - most),
        "link": link(notice.dashboard_url, run_id),
        "command": _cut(worst.get("command"), _COMMAND),
    }


def _member(member: Member, moment: datetime, words: int) -> dict[str, Any]:
    evidence = member.evidence
    resolved = member.change == "resolved"
    return {
        "id": member.alert_id,
        "episode": member.episode_id,
        "rule": member.rule,
        "severity": member.severity.value,
        "change": member.change,
        "resolve_reason": member.resolve_reason,
        "metric": evidence.get("metric"),
        "statistic": evidence.get("statistic"),
        "scope": evidence.get("scope"),
        **_number("value", evidence, "value"),
        "threshold": evidence.get("threshold"),
        "interval": evidence.get("interval"),
        "words": _cut(evidence.get("words"), words),
        "confirmation": _cut(evidence.get("confirmation"), words),
        "peak": member.peak.value,
        "peak_kind": member.peak.kind,
        **_number("resolved_value", evidence.get("now") or {}, "value"),
        "since": _instant(member.since),
        "first_run": member.first_run,
        "num_runs": member.num_runs,
        "duration_s": (moment - member.since).total_seconds() if resolved else None,
        "flapping": member.flapping,
    }


def _title(notice: Notice, members: Sequence[Member]) -> str:
    """Return one sentence for a phone's screen."""
    about = " / ".join(name for name in (notice.check, notice.candidate) if name)
    if notice.reason.startswith("resolved"):
        left = f", {notice.num_open} still open" if notice.num_open else ""
        return f"{about}: resolved: {_rules(members)}{left}"
    state = _STATES.get(notice.reason, "firing")
    said = members[0].evidence.get("words") or members[0].rule
    return f"{about}: {_severity(members).value}, {state}: {_rules(members)}: {said}"


_STATES = {
    "escalated": "escalated",
    "reminder": "still firing",
    "silence_expired": "still firing after silence",
}


def _rules(members: Sequence[Member]) -> str:
    names = [member.rule for member in members]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _worst_scopes(members: Sequence[Member]) -> list[Json]:
    """Return each rule's worst scopes, every rule's first one before any second one."""
    lists = [
        [{**scope, "rule": member.rule} for scope in member.evidence.get("scopes", [])]
        for member in members
    ]
    longest = max(map(len, lists), default=0)
    return [scopes[rank] for rank in range(longest) for scopes in lists if rank < len(scopes)]


def _num_scopes(members: Sequence[Member]) -> int:
    return sum(
        len(member.evidence.get("scopes", [])) + member.evidence.get("more_scopes", 0)
        for member in members
    )


def _badness(member: Member) -> tuple[bool, str]:
    return member.severity is not Severity.CRITICAL, member.rule


def _severity(members: Sequence[Member]) -> Severity:
    critical = any(member.severity is Severity.CRITICAL for member in members)
    return Severity.CRITICAL if critical else Severity.WARNING


def _duration(notice: Notice, members: Sequence[Member]) -> float | None:
    if notice.reason != "resolved_all":
        return None
    return (notice.moment - min(member.since for member in members)).total_seconds()


def _number(name: str, record: Json, key: str) -> dict[str, Any]:
    return {name: record.get(key), f"{name}_kind": record.get(f"{key}_kind", "missing")}


def _instant(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _cut_texts(record: Mapping[str, Any], words: int) -> dict[str, Any]:
    """Return a record for strangers: no secrets, no control characters, nothing endless."""
    return {key: _cut_value(scrubbed(value), words) for key, value in record.items()}


def _cut_value(value: Any, words: int) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    return _cut(value if isinstance(value, str) else json.dumps(value), words)


def _cut(text: str | None, words: int) -> str | None:
    if text is None:
        return None
    clean = printable(scrub(text))
    return clean if len(clean) <= words else f"{clean[: words - 1]}…"
