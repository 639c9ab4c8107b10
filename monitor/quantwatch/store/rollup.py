"""Which runs keep which of their tiers. Pure: runs, limits and a moment in, sets of run ids out.

Tiers, most bytes first: `tokens` (a matrix per prompt), `prompts` (sums per prompt), `layers`
(statistics at every scope but the whole model), `runs` (the run, its verdict, its statistics of the
whole model). Old layers are thinned to one run per week; nothing is averaged (ADR 0012).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from quantwatch.config.durations import seconds
from quantwatch.config.service import RetentionConfig


@dataclass(frozen=True, slots=True)
class StoredRun:
    """What retention looks at of a run. `ended` is False while it waits or is measured."""

    id: str
    check_id: int
    started_at: datetime
    ended: bool
    succeeded: bool
    flagged: bool
    """It breached a rule or its verdict is a regression."""
    baseline_run_id: str | None = None
    kept_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """How long each tier stays."""

    token_runs: int
    flagged: timedelta
    prompts: timedelta
    statistics: timedelta
    runs: timedelta
    logs: timedelta

    @classmethod
    def of(cls, config: RetentionConfig) -> "Limits":
        """Read the `retention` section."""
        times = ("flagged", "prompts", "statistics", "runs", "logs")
        lengths = {name: timedelta(seconds=seconds(getattr(config, name))) for name in times}
        return cls(token_runs=config.token_runs, **lengths)


@dataclass(frozen=True, slots=True)
class Kept:
    """The ids of the runs that keep each tier."""

    tokens: frozenset[str]
    prompts: frozenset[str]
    layers: frozenset[str]
    runs: frozenset[str]


def kept(
    runs: Collection[StoredRun],
    limits: Limits,
    now: datetime,
    *,
    held: Collection[str] = (),
    newest: Collection[str] = (),
    windows: Mapping[int, int] | None = None,
) -> Kept:
    """Return which runs keep which tiers.

    `held` keep everything (pinned baselines, runs of open episodes), as do runs that have not ended
    and those with `kept_until` ahead; `newest`, which pages point at, keep all but matrices. The
    baseline of a run that keeps a tier keeps it too: a comparison needs both sides. `windows` says
    of checks with a rolling baseline how many runs it is made of: their prompt sums stay.
    """
    safe = set(held) | {r.id for r in runs if _is_held(r, now)}
    tokens = safe | _newest_per_check(runs, limits.token_runs)
    tokens |= {r.id for r in runs if r.flagged and now - r.started_at <= limits.flagged}
    prompts = safe | {r.id for r in runs if r.flagged or now - r.started_at <= limits.prompts}
    prompts |= _newest_unflagged(runs, windows or {})
    layers = safe | set(newest) | _one_per_week(runs)
    layers |= {r.id for r in runs if r.flagged or now - r.started_at <= limits.statistics}
    whole = safe | set(newest) | {r.id for r in runs if now - r.started_at <= limits.runs}
    return Kept(*(_with_baselines(runs, ids) for ids in (tokens, prompts, layers, whole)))


def _is_held(run: StoredRun, now: datetime) -> bool:
    return not run.ended or (run.kept_until is not None and run.kept_until > now)


def _newest_per_check(runs: Iterable[StoredRun], count: int) -> set[str]:
    """Return the newest `count` succeeded runs of each check."""
    by_check: dict[int, list[StoredRun]] = {}
    for run in runs:
        if run.succeeded:
            by_check.setdefault(run.check_id, []).append(run)
    newest = (sorted(found, key=_age, reverse=True)[:count] for found in by_check.values())
    return {run.id for found in newest for run in found}


def _newest_unflagged(runs: Iterable[StoredRun], counts: Mapping[int, int]) -> set[str]:
    """Return the newest succeeded runs without a breach, as many as each check wants."""
    good = [run for run in runs if not run.flagged and run.check_id in counts]
    return {
        run
        for check_id, count in counts.items()
        for run in _newest_per_check((r for r in good if r.check_id == check_id), count)
    }


def _one_per_week(runs: Iterable[StoredRun]) -> set[str]:
    """Return the newest succeeded run of each check's ISO week (UTC)."""
    newest: dict[tuple[int, int, int], StoredRun] = {}
    for run in runs:
        year, week, _ = run.started_at.isocalendar()
        known = newest.get((run.check_id, year, week))
        if run.succeeded and (known is None or _age(run) > _age(known)):
            newest[run.check_id, year, week] = run
    return {run.id for run in newest.values()}


def _age(run: StoredRun) -> tuple[datetime, str]:
    return run.started_at, run.id


def _with_baselines(runs: Iterable[StoredRun], ids: set[str]) -> frozenset[str]:
    compared = (run.baseline_run_id for run in runs if run.id in ids)
    return frozenset(ids.union(baseline for baseline in compared if baseline is not None))
