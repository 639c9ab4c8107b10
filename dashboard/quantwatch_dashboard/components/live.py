"""Runs that wait or are under way, as compact cards with stage and progress."""

from collections.abc import Sequence
from datetime import datetime

from quantwatch.store.states import UnendedRun
from quantwatch_dashboard import text
from quantwatch_dashboard.components import progress
from quantwatch_dashboard.components.markup import Html, join, link, tag

_MOST, _FEW, _MOST_NAMES = 8, 2, 6


def cards(runs: Sequence[UnendedRun], now: datetime) -> Html:
    """Return one card per run under way; of many that wait only the names. Nothing without any."""
    if not runs:
        return tag("div")
    active = [run for run in runs if run.status.is_active]
    waiting = [run for run in runs if not run.status.is_active]
    if len(waiting) <= _FEW:
        active, waiting = [*active, *waiting], []
    grid = tag("div", *(_card(run, now) for run in active[:_MOST]), class_="qw-now")
    more = text.more(len(active), _MOST, "under way")
    said = tag("p", more, class_="qw-soft qw-small") if more else Html("")
    return tag("div", grid, said, _waiting(waiting), role="status")


def _waiting(runs: Sequence[UnendedRun]) -> Html:
    if not runs:
        return Html("")
    named = [join([", " if i else "", link(run.check, "run", run=run.run_id)])
             for i, run in enumerate(runs[:_MOST_NAMES])]  # fmt: skip
    rest = f" {text.more(len(runs), _MOST_NAMES)}".rstrip()
    return tag(
        "p",
        f"{text.plural(len(runs), 'run waits', 'runs wait')} for a worker: ",
        *named,
        rest,
        class_="qw-soft qw-small qw-wrap",
    )


def _card(run: UnendedRun, now: datetime) -> Html:
    now_doing = tag("span", progress.stage(run), class_="qw-soft")
    head = tag("div", link(run.check, "run", run=run.run_id), now_doing, class_="qw-run-head")
    return tag("div", head, progress.bar(run), _detail(run, now), class_="qw-run")


def _detail(run: UnendedRun, now: datetime) -> Html:
    parts = [f"{run.trigger}, {text.age(run.started_at, now)}"]
    if run.device:
        parts.append(run.device)
    if run.cancel_requested_at is not None:
        parts.append("asked to stop")
    said = tag("span", " · ".join(parts), class_="qw-soft")
    if not progress.is_silent(run, now):
        return tag("div", said, class_="qw-run-detail")
    return tag("div", said, " · heartbeat ", progress.heartbeat(run, now), class_="qw-run-detail")
