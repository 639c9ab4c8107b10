"""One statistic of a check over its runs, ready to be drawn: lines, limits, marks. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from quantwatch.domain import Verdict
from quantwatch.store.kinds import from_kind
from quantwatch.store.marks import RunMark
from quantwatch.store.records import SeriesPoint
from quantwatch_dashboard.logic.history import Change, Limit

MOST_POINTS = 6_000
"""Of all candidates together: more are thinned out, so that a figure stays below 2 MB."""
MOST_MARKS = 400


@dataclass(frozen=True, slots=True)
class Point:
    """One candidate in one run. `value` is in the unit of the metric, None if not measured."""

    run_id: str
    at: datetime
    value: float | None
    verdict: Verdict | None
    se: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One candidate over the runs, oldest first. `index` chooses its color."""

    name: str
    index: int
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Compared:
    """What the chosen candidate is held against: baseline, band of noise, absolute limits.

    `words` say at the line what it is; `why_not` why there is none, "" where nobody needs to know.
    """

    baseline: float | None = None
    band: tuple[float, float] | None = None
    limits: tuple[Limit, ...] = ()
    words: str = "baseline"
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Trend:
    """Everything on the picture. `left_out` runs are not drawn because there are too many."""

    lines: tuple[Line, ...]
    strong: str
    compared: Compared = field(default_factory=Compared)
    changes: tuple[Change, ...] = ()
    failures: tuple[RunMark, ...] = ()
    pinned_run: str | None = None
    left_out: int = 0

    @property
    def values(self) -> list[float | None]:
        """All values, for an axis."""
        return [point.value for line in self.lines for point in line.points]

    @property
    def chosen(self) -> Line | None:
        """The line of the chosen candidate."""
        return next((line for line in self.lines if line.name == self.strong), None)


def lines_of(points: Sequence[SeriesPoint], order: Sequence[str]) -> tuple[Line, ...]:
    """Return one line per candidate; those that are not in `order` (any more) come last."""
    found: dict[str, list[Point]] = {name: [] for name in order}
    for each in points:
        at = Point(
            each.run_id, each.started_at, from_kind(each.value, each.kind), each.verdict, each.se
        )
        found.setdefault(each.candidate, []).append(at)
    indexed = enumerate(found.items())
    return tuple(Line(name, i, tuple(points)) for i, (name, points) in indexed if points)


def newest_runs(marks: Sequence[RunMark], count: int | None) -> tuple[RunMark, ...]:
    """Return the newest `count` ended runs, all of them for None."""
    return tuple(marks if count is None else marks[-count:])


def within(points: Sequence[SeriesPoint], marks: Sequence[RunMark]) -> tuple[SeriesPoint, ...]:
    """Return the points of these runs."""
    runs = {mark.run_id for mark in marks}
    return tuple(point for point in points if point.run_id in runs)


def changes_within(changes: Sequence[Change], marks: Sequence[RunMark]) -> tuple[Change, ...]:
    """Return what changed in these runs; the first of them has nothing before it on the picture."""
    runs = {mark.run_id for mark in marks}
    return tuple(change for change in changes if change.run_id in runs)[-MOST_MARKS:]


def began(
    changes: Sequence[Change], marks: Sequence[RunMark], since: datetime | None
) -> tuple[Change, ...] | None:
    """Return what changed in the run where the present verdict began.

    None when it has no run before it, or is not among these runs: then nothing is known.
    """
    measured = [mark for mark in marks if mark.verdict is not None]
    first = next((i for i, mark in enumerate(measured) if mark.started_at == since), None)
    if not first:
        return None
    return tuple(change for change in changes if change.run_id == measured[first].run_id)


def failures(marks: Sequence[RunMark]) -> tuple[RunMark, ...]:
    """Return the runs that ended without a verdict."""
    return tuple(mark for mark in marks if mark.verdict is None)[-MOST_MARKS:]


def thinned(lines: Sequence[Line], most: int = MOST_POINTS) -> tuple[tuple[Line, ...], int]:
    """Keep of each stretch the run that stands out most; return the lines and how many runs went.

    All candidates keep the same runs, so that one can be compared with another.
    """
    runs = list(dict.fromkeys(p.run_id for line in lines for p in line.points))
    room = max(1, most // max(1, len(lines)))
    if len(runs) <= room:
        return tuple(lines), 0
    worst = _standing_out(lines)
    size = math.ceil(len(runs) / room)
    stretches = (runs[i : i + size] for i in range(0, len(runs), size))
    kept = {max(stretch, key=lambda run: worst.get(run, -1.0)) for stretch in stretches}
    kept |= {runs[0], runs[-1]}
    thin = [
        Line(line.name, line.index, tuple(p for p in line.points if p.run_id in kept))
        for line in lines
    ]
    return tuple(thin), len(runs) - len(kept)


def _standing_out(lines: Sequence[Line]) -> dict[str, float]:
    """Return, by run, how far any candidate is from its own median; not finite is farthest."""
    found: dict[str, float] = {}
    for line in lines:
        finite = sorted(abs(p.value) for p in line.points if p.value and math.isfinite(p.value))
        middle = finite[len(finite) // 2] if finite else 1.0
        for point in line.points:
            if point.value is not None:
                far = abs(point.value) / middle if math.isfinite(point.value) else math.inf
                found[point.run_id] = max(found.get(point.run_id, 0.0), far, 1 / (far or 1.0))
    return found
