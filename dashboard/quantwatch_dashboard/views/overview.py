"""Overview: is it worse, since when, and which check."""

import streamlit as st

from quantwatch.domain import Verdict
from quantwatch_dashboard import clock, queries
from quantwatch_dashboard.components import checks, page, trouble
from quantwatch_dashboard.components.markup import Html, tag


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
    verdicts = [check.decided.verdict for check in found if check.decided is not None]
    page.head(_headline(verdicts), f"{len(found)} check{'s' if len(found) > 1 else ''}")
    st.html(checks.check_table(found, queries.faults(url), now, zone))
    page.section(
        "Newest runs",
        "Failed and cancelled runs are the monitor's own trouble; they say nothing about a model.",
    )
    st.html(checks.run_table(queries.recent_runs(url), now, zone))
    st.html(_footer(zone.tzname(now) or "UTC", now.astimezone(zone).strftime("%H:%M:%S")))


def _headline(verdicts: list[Verdict | None]) -> str:
    regressions = verdicts.count(Verdict.REGRESSION)
    if regressions:
        return "1 regression" if regressions == 1 else f"{regressions} regressions"
    if not verdicts:
        return "No check has a verdict yet"
    undecided = verdicts.count(Verdict.INCONCLUSIVE)
    if undecided:
        return f"{undecided} inconclusive"
    warnings = verdicts.count(Verdict.WARN)
    return f"No regression, {warnings} with warnings" if warnings else "All checks pass"


def _footer(zone: str, read_at: str) -> Html:
    return tag(
        "p",
        f"Data as of {read_at} {zone}. Times on hover are in your time zone.",
        class_="qw-soft qw-small",
    )
