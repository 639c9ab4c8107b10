"""Check: how it stands, any statistic over its runs, its candidates, and what can be done."""

import streamlit as st

from quantwatch.domain import Verdict
from quantwatch.report.repeat import COMPARE
from quantwatch_dashboard import clock
from quantwatch_dashboard.components import check_card, page, trouble
from quantwatch_dashboard.components.address import pick
from quantwatch_dashboard.components.markup import Html, link
from quantwatch_dashboard.logic import trends
from quantwatch_dashboard.logic.summaries import CheckSummary
from quantwatch_dashboard.queries import alerts as alert_queries
from quantwatch_dashboard.queries import check as check_queries
from quantwatch_dashboard.queries import connection, overview
from quantwatch_dashboard.views import (
    check_actions,
    check_candidates,
    check_detection,
    check_runs,
    check_trend,
    live,
)

_AD_HOC = (
    "These are the runs of `quantwatch compare`, each of whatever was named then: neighbours on the"
    " trend may be of other models. A check in quantwatch.toml gives one pair a history of its own."
)


@trouble.guarded
def show() -> None:
    """Show the check named in the address; without a name, the worst one."""
    page.begin()
    url = connection.url()
    found = overview.checks(url)
    named = st.query_params.get("check") or (found[0].check if found else None)
    if named is None:
        page.head("Check")
        st.html(trouble.empty())
        return
    summary = check_queries.summary(url, named)
    _head(summary, [one.check for one in found])
    now, zone = clock.now(), clock.zone()
    st.html(check_card.card(summary, _known(url, summary), now, zone))
    live.show(url, named)
    check_actions.show(url, summary)
    if summary.decided is None:
        st.html(_unmeasured(summary))
    else:
        if summary.check == COMPARE:
            page.note(_AD_HOC)
        check_trend.show(url, summary)
        check_candidates.show(url, summary)
        check_detection.show(url, summary)
    check_runs.show(url, summary)


def _head(summary: CheckSummary, names: list[str]) -> None:
    """Show which check this is and let the reader go to another."""
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    with left:
        about = str(summary.state.config.get("description") or "check")
        run = summary.decided
        pair = link("compare runs …", "compare", run_b=run.run_id) if run is not None else ""
        page.head(summary.check, about, " · " if pair else "", pair)
    with right:
        chosen = pick("Check", "check", sorted({summary.check, *names}), summary.check)
    if chosen != summary.check:
        st.rerun()


def _unmeasured(summary: CheckSummary) -> Html:
    """Return what a check shows of which no run has succeeded."""
    waits = "A run waits or is under way: this page shows its results once it has ended."
    none = "Start a run above, or wait for the next one that is planned."
    ended = summary.newest is not None
    return trouble.state(
        "Nothing was measured yet",
        "No run of this check has succeeded, so there is no trend and nothing to compare."
        if ended
        else "This check has not run yet.",
        waits if summary.state.unended else none,
    )


def _known(url: str, summary: CheckSummary) -> check_card.Known:
    """Read what is known of a check besides how it stands."""
    run, muted = summary.decided, alert_queries.silenced(url).get(summary.check, 0)
    if run is None:
        return check_card.Known(silenced=muted)
    bad = run.verdict is Verdict.REGRESSION
    marks = check_queries.marks(url, summary.check)
    changed = check_queries.changed(url, summary.check)
    return check_card.Known(
        fault=check_queries.fault(url, run.run_id) if bad else "",
        silenced=muted,
        began=trends.began(changed, marks, summary.since),
    )
