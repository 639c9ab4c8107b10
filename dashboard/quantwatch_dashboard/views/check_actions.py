"""What can be done about a check: run it, pause it, choose its baseline."""

from collections.abc import Sequence

import streamlit as st

from quantwatch.domain import Verdict
from quantwatch.store.marks import RunMark
from quantwatch_dashboard import actions, clock, text
from quantwatch_dashboard.access import Role
from quantwatch_dashboard.components import asking
from quantwatch_dashboard.components.filters import choose
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.queries import check as check_queries
from quantwatch_dashboard.summaries import CheckSummary

_MOST = 50


def show(url: str, summary: CheckSummary) -> None:
    """Show the buttons; those that the role does not allow are off and say so."""
    check = summary.check
    with st.container(horizontal=True, key="qw-actions"):
        asking.button(
            "Run now", lambda who: actions.run_now(who, check, asking.once(f"run-{check}")),
            key=f"run-{check}", done=_started,
        )  # fmt: skip
        _pausing(summary)
        if (run := summary.under_way) is not None and run.cancel_requested_at is None:
            asking.button(
                "Cancel the run", lambda who: actions.cancel_run(who, run.run_id),
                key=f"cancel-{run.run_id}", ask="What it has measured so far is lost.",
                done="The run is asked to stop.",
            )  # fmt: skip
        if summary.state.quarantined_at is not None:
            asking.button(
                "Release from quarantine", lambda who: actions.release(who, check),
                key=f"release-{check}", needs=Role.ADMIN, done="It may run again.",
                ask="If it makes workers fail again, it takes other checks' time.",
            )  # fmt: skip
        _unpinning(summary)
    if summary.decided is not None:
        _pinning(url, summary)


def _started(result: object) -> str:
    run = getattr(result, "run_id", "")
    return f"Run {run} waits for a worker." if run else "A run waits for a worker."


def _pausing(summary: CheckSummary) -> None:
    # One key for both: what the one did is no longer true after the other.
    check = summary.check
    if summary.state.pause is None:
        asking.worded(
            "Pause", lambda who, why: actions.pause(who, check, why), key=f"pause-{check}",
            wants="Why, for the others", done="Paused: its slots are skipped until it is resumed.",
        )  # fmt: skip
    else:
        asking.button(
            "Resume", lambda who: actions.resume(who, check), key=f"pause-{check}",
            done="It runs again from its next slot on.",
        )  # fmt: skip


def _unpinning(summary: CheckSummary) -> None:
    check, kind = summary.check, (summary.state.config.get("baseline") or {}).get("kind", "pinned")
    if kind == "pinned" and summary.state.baseline_run_id is not None:
        asking.button(
            "Unpin the baseline", lambda who: actions.unpin(who, check), key=f"unpin-{check}",
            ask="Later runs are compared with nothing until another run is pinned.",
            done="No baseline is pinned.",
        )  # fmt: skip


def _pinning(url: str, summary: CheckSummary) -> None:
    """Let the reader choose the run that later ones are compared with."""
    check, pinned = summary.check, summary.state.baseline_run_id
    marks = [m for m in check_queries.marks(url, check) if m.verdict is not None][: -_MOST - 1 : -1]
    offered = {m.run_id: m for m in _best_first(marks) if m.run_id != pinned}
    if not offered:
        return
    with (
        st.expander("Pin another baseline"),
        st.container(horizontal=True, vertical_alignment="bottom"),
    ):
        chosen = choose("Run", "pin", list(offered), lambda r: _named(offered[r]), 380)
        asking.button(
            "Pin this run", lambda who: actions.pin(who, check, chosen), key=f"pin-{check}",
            done=f"Later runs are compared with …{chosen[-8:]}.",
        )  # fmt: skip
        st.html(tag("p", "Pin a run that was looked at and found good: what is wrong with it is "
                         "never reported again.", class_="qw-soft qw-small"))  # fmt: skip


def _best_first(marks: Sequence[RunMark]) -> list[RunMark]:
    """Offer the newest run that passes first: a regression is rarely what one wants to keep."""
    worst_first = list(Verdict)
    return sorted(marks, key=lambda m: -worst_first.index(m.verdict) if m.verdict else 0)


def _named(mark: RunMark) -> str:
    outcome = mark.verdict.value if mark.verdict is not None else mark.status.value
    return f"{text.instant(mark.started_at, clock.zone())[:16]} · {outcome} · …{mark.run_id[-8:]}"
