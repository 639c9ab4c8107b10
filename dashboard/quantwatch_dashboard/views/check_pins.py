"""The pinned baseline of a check: choosing it, and leaving the check without one."""

from collections.abc import Sequence

import streamlit as st

from quantwatch.store.marks import RunMark
from quantwatch_dashboard import actions, clock, text
from quantwatch_dashboard.components import address, asking
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.logic.summaries import CheckSummary
from quantwatch_dashboard.queries import check as check_queries
from quantwatch_dashboard.roles import Person

_MOST = 50


def _is_pinned(summary: CheckSummary) -> bool:
    """Say whether a pin counts: other kinds of baseline choose their run themselves."""
    baseline = summary.state.config.get("baseline") or {}
    return bool(baseline.get("kind", "pinned") == "pinned")


def unpinning(summary: CheckSummary) -> None:
    """Offer to leave the check without a pinned baseline."""
    check = summary.check
    if _is_pinned(summary) and summary.state.baseline_run_id is not None:
        asking.button(
            "Unpin the baseline", lambda who: actions.unpin(who, check), key=f"unpin-{check}",
            ask="Later runs are compared with nothing until another run is pinned.",
            done="No baseline is pinned.",
        )  # fmt: skip


def pinning(url: str, summary: CheckSummary) -> None:
    """Let the reader choose the run that later ones are compared with, where a pin counts."""
    if summary.decided is None or not _is_pinned(summary):
        return
    check, pinned = summary.check, summary.state.baseline_run_id
    marks = [m for m in check_queries.marks(url, check) if m.verdict is not None][: -_MOST - 1 : -1]
    offered = {m.run_id: m for m in _best_first(marks) if m.run_id != pinned}
    if not offered:
        return
    with (
        st.expander("Pin another baseline"),
        st.container(horizontal=True, vertical_alignment="bottom"),
    ):
        address.choose("Run", "pin", list(offered), lambda r: _named(offered[r]), 380, moves=True)
        asking.button(
            "Pin this run", lambda who: _pin(who, check), key=f"pin-{check}",
            done=lambda run: f"Later runs are compared with {text.short_id(str(run))}.",
        )  # fmt: skip
        st.html(tag("p", "Pin a run that was looked at and found good: what is wrong with it is "
                         "never reported again.", class_="qw-soft qw-small"))  # fmt: skip


def _pin(who: Person, check: str) -> str:
    """Pin what is chosen at the moment of the press, which may be newer than the page."""
    run_id = address.chosen_now("pin")
    actions.pin(who, check, run_id)
    return run_id


def _best_first(marks: Sequence[RunMark]) -> list[RunMark]:
    """Offer the newest run that passes first: a regression is rarely what one wants to keep."""
    return sorted(marks, key=lambda m: -m.verdict.rank if m.verdict else 0)


def _named(mark: RunMark) -> str:
    outcome = mark.verdict.value if mark.verdict is not None else mark.status.value
    return text.run_line(text.minute(mark.started_at, clock.zone()), outcome, mark.run_id)
