"""Alerts: what the newest succeeded run of each check found beyond its rules."""

import streamlit as st

from quantwatch_dashboard import clock, queries
from quantwatch_dashboard.components import page, trouble
from quantwatch_dashboard.components.alerts import alert_table
from quantwatch_dashboard.components.checks import moment
from quantwatch_dashboard.components.markup import link, tag
from quantwatch_dashboard.components.picker import pick
from quantwatch_dashboard.summaries import CheckSummary

_ALL = "all checks"


@trouble.guarded
def show() -> None:
    """Show the open alerts of one check or of all."""
    page.begin()
    url = queries.url()
    found = queries.checks(url)
    if not found:
        page.head("Alerts")
        st.html(trouble.empty())
        return
    open_alerts = [c for c in found if c.decided is not None and c.decided.num_alerts]
    total = sum(c.decided.num_alerts for c in open_alerts if c.decided is not None)
    page.head("Alerts", f"{total} open, in the newest succeeded run of each check")
    chosen = pick("Check", "check", [_ALL, *(c.check for c in found)], _ALL)
    shown = [c for c in open_alerts if chosen in (_ALL, c.check)]
    if not shown:
        st.html(
            trouble.state(
                "No open alert",
                "The newest succeeded run of each check shown here breaches no rule.",
            )
        )
    for check in shown:
        _show_check(url, check)


def _show_check(url: str, check: CheckSummary) -> None:
    assert check.decided is not None, "only checks with a succeeded run have alerts"
    run = check.decided
    when = moment(run.started_at, clock.now(), clock.zone())
    name = tag("h2", link(check.check, "run", run=run.run_id))
    st.html(tag("div", name, tag("p", "run of ", when), class_="qw-section"))
    st.html(alert_table(queries.result(url, run.run_id)))
