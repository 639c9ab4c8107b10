"""Runs that wait or are under way, as compact cards with stage and progress."""

from collections.abc import Sequence
from datetime import datetime

from quantwatch.domain import RunStatus
from quantwatch.store.states import UnendedRun
from quantwatch_dashboard import text
from quantwatch_dashboard.components.markup import Html, join, link, tag

_WORDS = {
    RunStatus.QUEUED: "waits for a worker",
    RunStatus.CLAIMED: "a worker has it",
    RunStatus.PREPARING: "loading models",
    RunStatus.MEASURING: "measuring",
    RunStatus.FINALIZING: "writing results",
}
_SILENT_S = 60
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
    more = len(active) - _MOST
    said = (
        tag("p", f"and {more} more under way", class_="qw-soft qw-small") if more > 0 else Html("")
    )
    return tag("div", grid, said, _waiting(waiting), role="status")


def _waiting(runs: Sequence[UnendedRun]) -> Html:
    if not runs:
        return Html("")
    named = [join([", " if i else "", link(run.check, "run", run=run.run_id)])
             for i, run in enumerate(runs[:_MOST_NAMES])]  # fmt: skip
    more = len(runs) - _MOST_NAMES
    rest = f" and {more} more" if more > 0 else ""
    return tag(
        "p",
        f"{len(runs)} runs wait for a worker: ",
        *named,
        rest,
        class_="qw-soft qw-small qw-wrap",
    )


def _card(run: UnendedRun, now: datetime) -> Html:
    words = _WORDS.get(run.status, run.status.value)
    stage = run.stage or ""
    if stage and stage.casefold() not in words.casefold():
        words = f"{words}: {stage}"
    head = tag("div", link(run.check, "run", run=run.run_id), tag("span", words, class_="qw-soft"),
               class_="t")  # fmt: skip
    return tag("div", head, _progress(run), _detail(run, now), class_="qw-run")


def _progress(run: UnendedRun) -> Html:
    if not run.tokens_total:
        return tag("div", tag("b", style="width: 0%"), class_="qw-progress")
    share = 100 * min(run.tokens_done, run.tokens_total) / run.tokens_total
    return tag(
        "div", tag("b", style=f"width: {share:.1f}%"), class_="qw-progress", role="progressbar",
        aria_valuenow=f"{share:.0f}", aria_valuemin="0", aria_valuemax="100",
        aria_label=f"{run.check}: {share:.0f} %",
    )  # fmt: skip


def _detail(run: UnendedRun, now: datetime) -> Html:
    parts = []
    if run.tokens_total:
        share = 100 * min(run.tokens_done, run.tokens_total) / run.tokens_total
        parts.append(f"{share:.0f} % of {run.tokens_total:,} tokens")
    parts.append(f"{run.trigger}, {text.age(run.started_at, now)}")
    if run.device:
        parts.append(run.device)
    if run.cancel_requested_at is not None:
        parts.append("asked to stop")
    said = tag("span", " · ".join(parts), class_="qw-soft")
    silent = run.heartbeat_at is not None and (now - run.heartbeat_at).total_seconds() > _SILENT_S
    if not (silent and run.status.is_active):
        return tag("div", said, class_="d")
    heard = f" · silent since {text.age(run.heartbeat_at, now) if run.heartbeat_at else ''}"
    return tag("div", said, tag("span", heard.replace(" ago", ""), class_="qw-hot"), class_="d")
