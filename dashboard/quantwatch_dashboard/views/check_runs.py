"""The list of a check's runs, newest first, page by page."""

from collections import defaultdict

import streamlit as st

from quantwatch_dashboard import clock
from quantwatch_dashboard.components import address, page, trouble
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.components.run_list import run_rows
from quantwatch_dashboard.logic.history import Change
from quantwatch_dashboard.logic.summaries import CheckSummary
from quantwatch_dashboard.queries import check as check_queries

_PER_PAGE = 20
_KINDS = ("all runs", "with a change", "not passing")


@st.fragment
@trouble.guarded
def show(url: str, summary: CheckSummary) -> None:
    """Show the ended runs with their outcome, duration, and what was another than before."""
    marks = check_queries.marks(url, summary.check)
    page.section(
        "Runs",
        "Newest first. What changed is said of the run in which it was another for the first time.",
    )
    if not marks:
        page.say("No run has ended yet.")
        return
    changes: dict[str, list[Change]] = defaultdict(list)
    for change in check_queries.changed(url, summary.check):
        changes[change.run_id].append(change)
    kind = address.choose("Show", "runs", _KINDS)
    shown = [
        m for m in reversed(marks)
        if kind == _KINDS[0]
        or (kind == _KINDS[1] and m.run_id in changes)
        or (kind == _KINDS[2] and (m.verdict is None or m.verdict.value != "pass"))
    ]  # fmt: skip
    table = st.container()
    with st.container(horizontal=True, vertical_alignment="center"):
        first = _PER_PAGE * address.number_of_page(
            "page", len(shown), _PER_PAGE, (summary.check, kind)
        )
        rows = shown[first : first + _PER_PAGE]
        said = _counted(first, len(rows), len(shown), len(marks))
        st.html(tag("span", said, class_="qw-soft qw-small"), width="content")
    if rows:
        pinned, now, zone = summary.state.baseline_run_id, clock.now(), clock.zone()
        table.html(run_rows(rows, changes, pinned, now, zone))


def _counted(first: int, number: int, total: int, looked_at: int) -> str:
    """Say which runs are shown, and of how many: older ones are not looked through."""
    among = "" if looked_at < check_queries.MOST_RUNS else f" among the newest {looked_at}"
    if not total:
        return f"No run of that kind{among}."
    return f"{first + 1}–{first + number} of {total} runs{among}"
