"""A run that waits or is under way: its stage, how far it is, when its worker was heard of."""

from datetime import datetime

from quantwatch.domain import RunStatus
from quantwatch.store.states import UnendedRun
from quantwatch_dashboard import text
from quantwatch_dashboard.components.markup import Html, join, tag
from quantwatch_dashboard.logic.service_words import SILENT_S

_WORDS = {
    RunStatus.QUEUED: "waits for a worker",
    RunStatus.CLAIMED: "a worker has it",
    RunStatus.PREPARING: "loading models",
    RunStatus.MEASURING: "measuring",
    RunStatus.FINALIZING: "writing results",
}


def stage(run: UnendedRun) -> str:
    """Return what is done now: ``measuring: int8``."""
    words = _WORDS.get(run.status, run.status.value)
    more = run.stage and run.stage.casefold() not in words.casefold()
    return f"{words}: {run.stage}" if more else words


def bar(run: UnendedRun) -> Html:
    """Return how much is done, as a bar and in words."""
    if not run.tokens_total:
        return tag("span", "how much there is to do is not known yet", class_="qw-soft")
    done = min(run.tokens_done, run.tokens_total)
    share = done / run.tokens_total
    said = f"{done:,} of {run.tokens_total:,} tokens, {text.share(share)}"
    drawn = tag(
        "span", tag("b", style=f"width: {100 * share:.1f}%"),
        class_="qw-progress", role="progressbar",
        aria_valuenow=f"{100 * share:.0f}", aria_valuemin="0", aria_valuemax="100",
        aria_label=f"{run.check}: {said}",
    )  # fmt: skip
    return join([drawn, tag("span", said, class_="qw-soft")])


def heartbeat(run: UnendedRun, now: datetime) -> Html:
    """Return when a worker was heard of, and what its lease does: that decides what comes next."""
    if run.heartbeat_at is None:
        return tag("span", "none yet", class_="qw-soft")
    words = text.age(run.heartbeat_at, now, fine=True)
    lease = _lease(run, now)
    if not is_silent(run, now):
        return tag("span", "; ".join(filter(None, (words, lease))), class_="qw-soft")
    said = f"{words}: the worker is silent"
    return tag("span", "; ".join(filter(None, (said, lease))), class_="qw-hot")


def is_silent(run: UnendedRun, now: datetime) -> bool:
    """Say whether a worker should have been heard of: its lease ran out, or it is long ago."""
    if run.heartbeat_at is None or not run.status.is_active:
        return False
    return _is_lost(run, now) or (now - run.heartbeat_at).total_seconds() > SILENT_S


def _lease(run: UnendedRun, now: datetime) -> str:
    if run.lease_until is None or not run.status.is_active:
        return ""
    if _is_lost(run, now):
        return "its lease has run out, so the run will be taken back"
    return f"its lease lasts {text.passed((run.lease_until - now).total_seconds())}"


def _is_lost(run: UnendedRun, now: datetime) -> bool:
    return run.lease_until is not None and run.lease_until < now
