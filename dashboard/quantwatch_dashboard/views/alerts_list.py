"""Open and past episodes of all checks, with filters; and rules that no alert speaks of yet."""

import streamlit as st

from quantwatch_dashboard import clock, text
from quantwatch_dashboard.components import address, page, trouble
from quantwatch_dashboard.components.address import every, given
from quantwatch_dashboard.components.breaches import alert_table
from quantwatch_dashboard.components.episodes import ended_table, open_table
from quantwatch_dashboard.components.markup import link, tag
from quantwatch_dashboard.components.words import moment
from quantwatch_dashboard.logic.episodes import STATES, ShownEpisode, Wanted, filtered
from quantwatch_dashboard.queries import alerts as alert_queries
from quantwatch_dashboard.queries import overview, runs
from quantwatch_dashboard.text import ANY

_PAGE = 50
_MOST_CHECKS = 10


def show(url: str, found: tuple[ShownEpisode, ...]) -> None:
    """Show what passes the filters, open episodes first."""
    wanted = _filters(url)
    now, zone = clock.now(), clock.zone()
    opened = filtered(found, wanted)
    if opened:
        st.html(open_table(_page("open_page", opened, wanted), now, zone))
    elif wanted.state != "ended":
        _nothing(len(found), wanted)
    if wanted.state in ("all", "ended"):
        past = alert_queries.ended_episodes(url, wanted.check, wanted.severity)
        _past(filtered(past, wanted), len(past), wanted)
    if wanted.state in ("all", "open") and wanted.severity is None and not wanted.words:
        _newest_runs(url, wanted.check, found)


def _filters(url: str) -> Wanted:
    """Let the reader filter."""
    names = sorted(each.check for each in overview.checks(url))
    with st.container(horizontal=True, vertical_alignment="bottom"):
        check = address.choose("Check", "check", [ANY, *names], every("checks"), 220)
        state = address.choose("State", "state", list(STATES), lambda name: STATES[name][0], 220)
        levels = [ANY, "critical", "warning"]
        severity = address.choose("Severity", "severity", levels, every("severities"))
        words = address.search("Text", "q", "rule, candidate, layer, comment")
    return Wanted(given(check), state, given(severity), words)


def _page(key: str, found: tuple[ShownEpisode, ...], wanted: Wanted) -> tuple[ShownEpisode, ...]:
    """Let the reader turn pages where there is more than one."""
    at = address.number_of_page(key, len(found), _PAGE, wanted)
    return found[at * _PAGE : (at + 1) * _PAGE]


def _nothing(num_open: int, wanted: Wanted) -> None:
    if wanted.is_narrow and num_open:
        title, words = "No open alert here", f"{num_open} open ones don't pass the filters."
    else:
        title, words = "No open alert", "No rule of any check is breached for long enough."
    st.html(trouble.state(title, words))


def _past(found: tuple[ShownEpisode, ...], looked_at: int, wanted: Wanted) -> None:
    said = "Episodes that are over, the newest end first."
    if looked_at == alert_queries.MOST_ENDED:
        said += f" Only the last {looked_at} are looked through."
    page.section("Past", said)
    if found:
        st.html(ended_table(_page("page", found, wanted), clock.now(), clock.zone()))
    else:
        page.say("No episode that is over passes the filters.")


def _newest_runs(url: str, check: str | None, found: tuple[ShownEpisode, ...]) -> None:
    """Show what the newest runs breach where no alert is open: nobody will be told of it."""
    spoken = {one.listed.check for one in found}
    breached = [
        (each.check, each.decided)
        for each in overview.checks(url)
        if each.decided is not None and each.decided.num_alerts
        if each.check not in spoken and check in (None, each.check)
    ]
    if not breached:
        return
    page.section(
        "Breached by the newest run, without an open alert",
        "Runs that were started by hand and kept no alert, or from before this database did.",
    )
    shown = breached[:_MOST_CHECKS]
    alerts = runs.alerts_of(url, tuple(run.run_id for _, run in shown))
    for name, run in shown:
        when = moment(run.started_at, clock.now(), clock.zone())
        st.html(tag("p", link(name, "run", run=run.run_id), ", run of ", when))
        st.html(alert_table(alerts.get(run.run_id, ()), (each for each, _ in run.candidates)))
    if more := text.more(len(breached), _MOST_CHECKS, "checks"):
        page.say(more)
