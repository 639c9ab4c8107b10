"""What a changed quantwatch.toml would change: a plan, made before anything is applied. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal

from quantwatch.config.endpoints import ADDRESS
from quantwatch.config.roots import runs_own_code
from quantwatch.config.schema import CheckConfig, Config
from quantwatch.telemetry import canonical_sha

Kind = Literal["check", "schedule", "endpoint", "settings"]
Action = Literal["added", "removed", "changed"]
Document = Mapping[str, Any]
NEXT_START = "from the next start on"
"""The mark of settings that a running service does not take over."""
OWN_CODE = "runs its own code"
"""The mark of a check whose model may run code of its own."""
_MOST_DETAILS = 8
_MOST_LETTERS = 60


@dataclass(frozen=True, slots=True)
class Applied:
    """What the service works with now, as documents by name."""

    checks: Mapping[str, Document] = field(default_factory=dict)
    endpoints: Mapping[str, Document | None] = field(default_factory=dict)
    """None: in use, but of its settings nothing is known."""
    settings: Mapping[str, Document] = field(default_factory=dict)
    """Sections `service`, `retention` and `dashboard`; the defaults where one is absent."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Where the relative paths of a check start."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that would be added, removed or changed."""

    action: Action
    kind: Kind
    name: str
    details: tuple[str, ...] = ()
    """Which keys, and from what to what."""
    marks: tuple[str, ...] = ()
    """What people must see before they agree."""

    def __str__(self) -> str:
        words = f"{self.action} {self.kind} {self.name}"
        more = [*(f"[{mark}]" for mark in self.marks), "; ".join(self.details)]
        return " ".join([words, *filter(None, more)])


def check_document(check: CheckConfig) -> dict[str, Any]:
    """Return a check as it is stored and as runs are queued with it: plain JSON."""
    return check.model_dump(mode="json")


def documents(config: Config) -> dict[str, dict[str, Any]]:
    """Return all checks as documents by name."""
    return {name: check_document(check) for name, check in config.checks.items()}


def document_sha(document: Document) -> str:
    """Return the digest of a check's document."""
    return canonical_sha(document)


def settings_documents(config: Config) -> dict[str, dict[str, Any]]:
    """Return the sections that are neither checks nor endpoints as documents.

    Without `database`: that says which database a plan is compared with.
    """
    sections = {
        "service": config.service,
        "retention": config.retention,
        "cache": config.cache,
        # So that the audit knows who gave which role to whom.
        "dashboard": config.dashboard,
    }
    return {name: section.model_dump(mode="json") for name, section in sections.items()}


def plan(
    config: Config,
    endpoints: Mapping[str, Document] | None,
    applied: Applied,
    folder: str | None = None,
) -> tuple[Change, ...]:
    """Return what applying a configuration would change, in the order of names; () for nothing.

    `endpoints` are the documents of the resolved endpoints, None leaves endpoints out; `folder` is
    the configuration's own, None leaves it out.
    """
    wanted = documents(config)
    changes = [*_check_changes(wanted, applied, folder)]
    changes += _schedule_changes(wanted, applied.checks)
    if endpoints is not None:
        changes += _endpoint_changes(endpoints, applied.endpoints)
    changes += _settings_changes(settings_documents(config), applied.settings)
    return tuple(_marked(change, config) for change in changes)


def mark(check: CheckConfig) -> str:
    """Return the mark of a check for lists and logs: which variants run their own code, or ""."""
    names = runs_own_code(check)
    return f"{OWN_CODE}: {', '.join(names)}" if names else ""


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Yield which keys of two documents differ: `suite.limit: 4 → 8`."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            at = f"{where}.{key}" if where else str(key)
            yield from differences(before.get(key), after.get(key), at)
    elif _are_lists(before, after) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif before != after:
        old, new = _from_where_they_differ(before, after)
        yield f"{where}: {_shown(old)} → {_shown(new)}"


def _check_changes(
    wanted: Mapping[str, Document], applied: Applied, folder: str | None
) -> Iterator[Change]:
    for name in sorted({*wanted, *applied.checks}):
        before, after = applied.checks.get(name), wanted.get(name)
        if folder is not None and before is not None and after is not None:
            before = {**before, "folder": applied.folders.get(name)}
            after = {**after, "folder": folder}
        yield from _change("check", name, before, after, without="schedule")


def _schedule_changes(
    wanted: Mapping[str, Document], applied: Mapping[str, Document]
) -> Iterator[Change]:
    for name in sorted({*wanted, *applied}):
        before, after = (each.get(name, {}).get("schedule") for each in (applied, wanted))
        yield from _change("schedule", name, before, after)


def _endpoint_changes(
    wanted: Mapping[str, Document], applied: Mapping[str, Document | None]
) -> Iterator[Change]:
    for name in sorted({*wanted, *applied}):
        if name not in applied:
            yield Change("added", "endpoint", name)
        elif name not in wanted:
            yield Change("removed", "endpoint", name)
        elif found := _endpoint_differences(applied[name], wanted[name]):
            yield Change("changed", "endpoint", name, _cut(found))


def _endpoint_differences(before: Document | None, after: Document) -> list[str]:
    if before is None:
        return ["its settings, which were never applied"]
    old, new = ({k: v for k, v in each.items() if k != ADDRESS} for each in (before, after))
    # Which of them it was is not told.
    hidden = [] if before.get(ADDRESS) == after.get(ADDRESS) else ["its address or secrets"]
    return [*differences(old, new), *hidden]


def _settings_changes(
    wanted: Mapping[str, Document], applied: Mapping[str, Document]
) -> Iterator[Change]:
    first = settings_documents(Config(schema_version=1))
    for name in sorted(wanted):
        before = applied.get(name, first[name])
        for change in _change("settings", name, before, wanted[name]):
            marks = (NEXT_START,) if name == "service" else ()
            yield replace(change, marks=marks)


def _change(
    kind: Kind, name: str, before: Document | None, after: Document | None, without: str = ""
) -> Iterator[Change]:
    if before is None and after is None:
        return
    if before is None or after is None:
        yield Change("added" if before is None else "removed", kind, name)
        return
    old, new = ({k: v for k, v in each.items() if k != without} for each in (before, after))
    if found := list(differences(old, new)):
        yield Change("changed", kind, name, _cut(found))


def _marked(change: Change, config: Config) -> Change:
    check = config.checks.get(change.name)
    if change.kind != "check" or check is None or not (words := mark(check)):
        return change
    return replace(change, marks=(words,))


def _cut(found: Sequence[str]) -> tuple[str, ...]:
    hidden = len(found) - _MOST_DETAILS
    more = (f"… and {hidden} more",) if hidden > 0 else ()
    return (*found[:_MOST_DETAILS], *more)


def _are_lists(before: Any, after: Any) -> bool:
    return isinstance(before, list) and isinstance(after, list)


def _from_where_they_differ(before: Any, after: Any) -> tuple[Any, Any]:
    """Return two values; of long texts what they have in common at the beginning is left out."""
    if not (isinstance(before, str) and isinstance(after, str)):
        return before, after
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    start = sum(1 for _ in alike) - _MOST_LETTERS // 3
    if start <= 0 or max(len(before), len(after)) <= _MOST_LETTERS:
        return before, after
    return f"…{before[start:]}", f"…{after[start:]}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"
