"""Overview: is it worse, since when, and which check."""

from collections.abc import Callable, Mapping, Sequence

import streamlit as st

from quantwatch_dashboard import clock
from quantwatch_dashboard.components import address, checks, page, trouble
from quantwatch_dashboard.components.markup import Html, tag
from quantwatch_dashboard.components.verdict import tone, verdict_word
from quantwatch_dashboard.logic import standings, verdict_words
from quantwatch_dashboard.logic.standings import Wanted
from quantwatch_dashboard.logic.summaries import CheckSummary
from quantwatch_dashboard.queries import alerts as alert_queries
from quantwatch_dashboard.queries import connection, overview, runs
from quantwatch_dashboard.text import ANY
from quantwatch_dashboard.views import live

_PER_PAGE = 25
_NUM_RUNS = 12


@trouble.guarded
def show() -> None:
    """Show one row per check, worst first, and the newest runs."""
    page.begin()
    url, now, zone = connection.url(), clock.now(), clock.zone()
    found = overview.checks(url)
    if not found:
        page.head("Overview")
        st.html(trouble.empty())
        return
    used = standings.in_use(found)
    faults = overview.faults(url, verdict_words.named(used))
    page.head(verdict_words.headline(used), verdict_words.counts(used))
    words = verdict_words.answer(used, faults, now)
    st.html(tag("p", words, class_=f"qw-answer {tone(verdict_words.worst_verdict(used))}"))
    live.show(url)
    _checks(url, found)
    page.section(
        "Newest runs",
        "Failed and cancelled runs are the monitor's own trouble; they say nothing about a model.",
    )
    st.html(checks.run_table(runs.recent_runs(url)[:_NUM_RUNS], now, zone))


def _checks(url: str, found: Sequence[CheckSummary]) -> None:
    now, zone = clock.now(), clock.zone()
    wanted = _wanted(found)
    shown = standings.matching(found, wanted, now)
    if not shown:
        st.html(_none_fits(len(found)))
        return
    table = st.container()
    with st.container(horizontal=True, vertical_alignment="center"):
        first = _PER_PAGE * address.number_of_page("page", len(shown), _PER_PAGE, wanted)
        rows = overview.with_trends(url, shown[first : first + _PER_PAGE])
        if len(shown) > len(rows):
            said = f"{first + 1}–{first + len(rows)} of {len(shown)} checks"
            st.html(tag("span", said, class_="qw-soft qw-small"), width="content")
    beside = checks.Beside(now, zone, overview.faults(url, rows), alert_queries.silenced(url))
    with table:
        _tables(rows, beside)


def _tables(rows: Sequence[CheckSummary], beside: checks.Beside) -> None:
    """Show the configured checks, then those of which only the runs are left."""
    used = standings.in_use(rows)
    if used:
        st.html(checks.check_table(used, beside))
    if len(rows) > len(used):
        page.section(
            "No longer configured",
            "They were taken out of the configuration and are not measured any more; "
            "nothing above counts them.",
        )
        st.html(checks.check_table(rows[len(used) :], beside))


def _wanted(found: Sequence[CheckSummary]) -> Wanted:
    """Let the reader filter, search and sort; the address keeps it."""
    numbers = standings.counted(found)
    there = [name for name in standings.VERDICTS if numbers[name]]
    verdict = address.pills(
        "Verdict", "verdict", there, lambda name: f"{verdict_word(name)} {numbers[name]}"
    )
    with st.container(horizontal=True, vertical_alignment="bottom"):
        search = address.search("Search", "q", "check, candidate, tag …")
        state = address.choose("State", "state", list(standings.STATES), _called(standings.STATES))
        tags = (ANY, *standings.tags_of(found))
        chosen = address.choose("Tag", "tag", tags, address.every("tags")) if len(tags) > 1 else ANY
        sort = address.choose("Sorted by", "sort", list(standings.SORTS), _called(standings.SORTS))
    return Wanted(search, verdict, state, chosen, sort)


def _called(named: Mapping[str, tuple[str, object]]) -> Callable[[str], str]:
    return lambda name: named[name][0]


def _none_fits(number: int) -> Html:
    return trouble.state(
        "No check fits",
        f"There are {number} checks, none of which fits everything that is asked for above.",
        "Clear the search or choose all states.",
    )
