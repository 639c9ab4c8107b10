"""Overview: is it worse, since when, and which check."""

from collections.abc import Sequence

import streamlit as st

from quantwatch_dashboard import clock, queries, standings, verdict_words
from quantwatch_dashboard.components import checks, filters, page, trouble
from quantwatch_dashboard.components.markup import Html, tag
from quantwatch_dashboard.components.verdict import tone, verdict_word
from quantwatch_dashboard.queries.silenced import silenced
from quantwatch_dashboard.standings import ANY, Wanted
from quantwatch_dashboard.summaries import CheckSummary
from quantwatch_dashboard.views import live

_PER_PAGE = 25
_NUM_RUNS = 12
_SORTS = {
    "worst": "worst first", "change": "largest change", "since": "newest verdict",
    "next": "next run", "success": "oldest success", "name": "name",
}  # fmt: skip
_STATES = {
    ANY: "any", "alerts": "alerts fire", "trouble": "monitor trouble", "running": "running",
    "paused": "paused", "overdue": "overdue",
}  # fmt: skip


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
    used = standings.in_use(found)
    faults = queries.faults(url, verdict_words.named(used))
    page.head(verdict_words.headline(used), verdict_words.counts(used))
    words = verdict_words.answer(used, faults, now)
    st.html(tag("p", words, class_=f"qw-answer {tone(verdict_words.worst_verdict(used))}"))
    live.show(url)
    _checks(url, found)
    page.section(
        "Newest runs",
        "Failed and cancelled runs are the monitor's own trouble; they say nothing about a model.",
    )
    st.html(checks.run_table(queries.recent_runs(url)[:_NUM_RUNS], now, zone))


def _checks(url: str, found: Sequence[CheckSummary]) -> None:
    now, zone = clock.now(), clock.zone()
    wanted = _wanted(found)
    shown = standings.matching(found, wanted, now)
    if not shown:
        st.html(_none_fits(len(found)))
        return
    table = st.container()
    with st.container(horizontal=True, vertical_alignment="center", key="qw-pager"):
        first = _PER_PAGE * filters.number_of_page("page", len(shown), _PER_PAGE, wanted)
        rows = queries.with_trends(queries.url(), shown[first : first + _PER_PAGE])
        if len(shown) > len(rows):
            said = f"{first + 1}–{first + len(rows)} of {len(shown)} checks"
            st.html(tag("span", said, class_="qw-soft qw-small"), width="content")
    beside = checks.Beside(now, zone, queries.faults(url, rows), silenced(url))
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
    verdict = filters.pills(
        "Verdict", "verdict", there, lambda name: f"{verdict_word(name)} {numbers[name]}"
    )
    with st.container(horizontal=True, vertical_alignment="bottom", key="qw-filters"):
        search = filters.search("Search", "q", "check, candidate, tag …")
        state = filters.choose("State", "state", standings.STATES, _STATES.__getitem__)
        tags = (ANY, *standings.tags_of(found))
        chosen = filters.choose("Tag", "tag", tags, _tag_word) if len(tags) > 1 else ANY
        sort = filters.choose("Sorted by", "sort", standings.SORTS, _SORTS.__getitem__)
    return Wanted(search, verdict, state, chosen, sort)


def _tag_word(name: str) -> str:
    return "any" if name == ANY else name


def _none_fits(number: int) -> Html:
    return trouble.state(
        "No check fits",
        f"There are {number} checks, none of which fits everything that is asked for above.",
        "Clear the search or choose “any”.",
    )
