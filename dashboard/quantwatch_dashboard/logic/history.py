"""A check's runs on a time axis: what changed between them, and which limits hold. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from quantwatch.alerts.overrides import rules_for
from quantwatch.baselines.drift import part_of
from quantwatch.config.parsing import parse
from quantwatch.config.schema import CheckConfig
from quantwatch.config.scopes import matches
from quantwatch.domain import Json, Severity, Verdict
from quantwatch.domain.drift import ABSENT
from quantwatch.errors import ConfigError
from quantwatch.store.marks import CandidateMark, RunMark
from quantwatch.store.records import SeriesPoint
from quantwatch_dashboard import text
from quantwatch_dashboard.logic.leaves import leaves

_LONGEST_VALUE = 36


@dataclass(frozen=True, slots=True)
class Change:
    """What was another in a run than in the one before. Records have name, part, value, baseline.

    `candidate` is None for what concerns all of them: environment, reference, what is measured.
    """

    run_id: str
    at: datetime
    candidate: str | None
    records: tuple[Json, ...]


def change_words(record: Json) -> str:
    """Return what changed from run to run: ``driver: 550.1 → 560.2``; digests by their start."""
    name = str(record["name"]).removeprefix("environment.")
    return f"{name}: {_changed(record['baseline'])} → {_changed(record['value'])}"


def _changed(value: Any) -> str:
    if value == ABSENT:
        return "absent"
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.clip(text.digest(shown), _LONGEST_VALUE)


def changes(marks: Sequence[RunMark]) -> tuple[Change, ...]:
    """Return what changed from run to run, oldest first; runs without results are passed over."""
    measured = [mark for mark in marks if mark.verdict is not None]
    known: dict[str, CandidateMark] = {}
    found: list[Change] = []
    for i, mark in enumerate(measured):
        if i:
            records = _records(_common(measured[i - 1]), _common(mark))
            found += [Change(mark.run_id, mark.started_at, None, records)] if records else []
        for candidate in mark.candidates:
            before = known.get(candidate.name)
            records = () if before is None else _records(_own(before), _own(candidate))
            if records:
                found.append(Change(mark.run_id, mark.started_at, candidate.name, records))
            if candidate.digests is not None:
                known[candidate.name] = candidate
    return tuple(found)


def _common(mark: RunMark) -> Iterator[tuple[str, Any]]:
    yield "", mark.measured
    yield "reference", mark.reference or {}
    yield "environment", mark.environment


def _own(candidate: CandidateMark) -> Iterator[tuple[str, Any]]:
    if candidate.digests is not None:
        yield "", {**candidate.digests, "execution": candidate.execution}


def _records(before: Iterator[tuple[str, Any]], now: Iterator[tuple[str, Any]]) -> tuple[Json, ...]:
    found: list[Json] = []
    for (prefix, old), (_, new) in zip(before, now, strict=False):
        # Runs made with the same share their records: nothing is compared for most of them.
        if old is not new and old != new:
            found += _differences(dict(leaves(old, prefix)), dict(leaves(new, prefix)))
    return tuple(found)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Json]:
    for name in dict.fromkeys((*new, *old)):
        value, known = new.get(name, ABSENT), old.get(name, ABSENT)
        if value != known:
            yield {"name": name, "part": part_of(name), "value": value, "baseline": known}


@dataclass(frozen=True, slots=True)
class Limit:
    """An absolute limit on a statistic: beyond it, a rule is breached."""

    rule: str
    value: float
    severity: Severity


def limits(
    config: Json, candidate: str, metric: str, scope: str, statistic: str
) -> tuple[Limit, ...] | None:
    """Return the absolute rules on what is shown; None when the configuration can't be read.

    A configuration of an older version may not be understood any more.
    """
    try:
        check = parse(CheckConfig, config, "check")
        watched = [each for each in check.candidates if each.name == candidate]
        rules = [rule for each in watched for rule in rules_for(check, each)]
    except ConfigError:
        return None
    return tuple(
        Limit(rule.name, rule.threshold, rule.severity)
        for rule in rules
        if rule.kind == "absolute" and rule.threshold is not None
        if (rule.metric, rule.statistic) == (metric, statistic)
        if matches(rule.globs, scope)
    )


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """One candidate's size and quality, its output KL in nats.

    `value` is None where it could not be measured, or is not finite as `kind` says.
    """

    candidate: str
    index: int
    bits_per_weight: float
    size_bytes: int | None
    value: float | None
    kind: str
    verdict: Verdict | None
    is_best: bool
    """Whether no other candidate is both smaller and better."""


def tradeoffs(mark: RunMark, points: Sequence[SeriesPoint]) -> tuple[Tradeoff, ...]:
    """Return the candidates of a run whose size is known, with the error that `points` hold."""
    values = {p.candidate: p for p in points if p.run_id == mark.run_id}
    sized = [
        (i, c, c.bits_per_weight, values[c.name])
        for i, c in enumerate(mark.candidates)
        if c.bits_per_weight is not None and c.name in values
    ]
    costs = [(bits, p.value) for _, _, bits, p in sized if p.value is not None]
    return tuple(
        Tradeoff(
            c.name, i, bits, c.size_bytes, p.value, p.kind, c.verdict,
            p.value is not None and not _is_beaten((bits, p.value), costs),
        )
        for i, c, bits, p in sized
    )  # fmt: skip


def _is_beaten(one: tuple[float, float], others: Sequence[tuple[float, float]]) -> bool:
    return any(a <= one[0] and b <= one[1] and (a, b) != one for a, b in others)
