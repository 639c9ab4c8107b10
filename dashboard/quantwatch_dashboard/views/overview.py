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
    page.head(_headline(found), f"{len(found)} check{'s' if len(found) > 1 else ''}")
    st.html(checks.check_table(found, queries.faults(url), now, zone))
    page.section(
        "Newest runs",
        "Failed and cancelled runs are the monitor's own trouble; they say nothing about a model.",
    )
    st.html(checks.run_table(queries.recent_runs(url), now, zone))


def _headline(found: Sequence[CheckSummary]) -> str:
    """Say the worst first; checks whose newest run did not finish are never passed over."""
    verdicts = [check.decided.verdict for check in found if check.decided is not None]
    broken, warned = verdicts.count(Verdict.REGRESSION), verdicts.count(Verdict.WARN)
    undecided = verdicts.count(Verdict.INCONCLUSIVE)
    parts = [f"{broken} regression{'s' if broken > 1 else ''}"] if broken else []
    parts += [f"{undecided} inconclusive"] if undecided else []
    if verdicts and not parts:
        parts = [f"No regression, {warned} with warnings" if warned else "All checks pass"]
    unfinished = sum(check.trouble is not None for check in found)
    parts += [f"{unfinished} not measured lately"] if unfinished else []
    return ", ".join(parts) or "No check has a verdict yet"
