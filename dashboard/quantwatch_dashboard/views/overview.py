"""Overview: is it worse, since when, and which check."""

from collections.abc import Sequence

import streamlit as st

from quantwatch.domain import Verdict
from quantwatch_dashboard import clock, queries
from quantwatch_dashboard.components import checks, page, trouble
from quantwatch_dashboard.summaries import CheckSummary


@trouble.guarded
def show() -> None:
    """Show one row per check, worst first, and the newest runs."""
    page.begin()
    url, now, zone = queries.url(), clock.now(), clock.zone()
    found = queries.checks(url)
    if not found:
        page.head("Overview")
        st.html(trouble.empty())
        return
    page.head(_headline(found), _counts(found))
    st.html(checks.check_table(found, queries.faults(url), now, zone))
    page.section(
        "Newest runs",
        "Failed and cancelled runs are the monitor's own trouble; they say nothing about a model.",
    )
    st.html(checks.run_table(queries.recent_runs(url), now, zone))


def _headline(found: Sequence[CheckSummary]) -> str:
    """Say the worst. Not all checks pass while the newest run of one did not finish."""
    verdicts = [check.decided.verdict for check in found if check.decided is not None]
    regressions = verdicts.count(Verdict.REGRESSION)
    if regressions:
        return "1 regression" if regressions == 1 else f"{regressions} regressions"
    if not verdicts:
        return "No check has a verdict yet"
    undecided, warned = verdicts.count(Verdict.INCONCLUSIVE), verdicts.count(Verdict.WARN)
    if undecided:
        return f"{undecided} inconclusive"
    if warned:
        return f"No regression, {warned} with warnings"
    return "No regression" if _num_unfinished(found) else "All checks pass"


def _counts(found: Sequence[CheckSummary]) -> str:
    checks, unfinished = len(found), _num_unfinished(found)
    counted = f"{checks} check{'s' if checks > 1 else ''}"
    return f"{counted}, {unfinished} not measured lately" if unfinished else counted


def _num_unfinished(found: Sequence[CheckSummary]) -> int:
    return sum(check.trouble is not None for check in found)
