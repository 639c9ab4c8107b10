"""Compare: any two candidates of any two runs, with the differences that are more than chance."""

from collections.abc import Sequence

import streamlit as st

from quantwatch.baselines.comparable import Mismatch, differing
from quantwatch.domain import RunResult
from quantwatch_dashboard.components import compare, page, trouble
from quantwatch_dashboard.components.address import flag
from quantwatch_dashboard.logic import contrast, identities
from quantwatch_dashboard.logic.contrast import Side, Tests
from quantwatch_dashboard.queries import compare as compare_queries
from quantwatch_dashboard.queries import connection, overview, runs
from quantwatch_dashboard.views import compare_inside, compare_layers, compare_sides


@trouble.guarded
def show() -> None:
    """Show the two candidates that the address names, or the worst run and what came before."""
    page.begin()
    url = connection.url()
    usual = _usual(url)
    if usual is None:
        page.head("Compare")
        st.html(trouble.nothing_measured() if overview.checks(url) else trouble.empty())
        return
    page.head("Compare", "A is before, B is after: differences are B − A")
    b_result = _result(url, "b", usual)
    a_result = _result(url, "a", compare_queries.usual_other(url, b_result))
    a, b = compare_sides.choose(url, a_result, b_result)
    if (a.result.run_id, b.result.run_id) != (a_result.run_id, b_result.run_id):
        st.rerun()
    why = tuple(differing(b.result, a.result))
    tests: Tests = {} if why or a.key == b.key else compare_queries.tests(url, a.key, b.key)
    _headline(a, b, tests, why)
    _facts(a, b)
    compare_layers.show(a, b, tests)
    compare_inside.show(url, a, b)


def _usual(url: str) -> str | None:
    """Return the newest measured run of the worst check, None when nothing was ever measured."""
    decided = (check.decided.run_id for check in overview.checks(url) if check.decided is not None)
    return next(decided, None) or next(iter(compare_queries.options(url)), None)


def _result(url: str, side: str, usual: str) -> RunResult:
    return runs.result(url, runs.resolve(url, st.query_params.get(f"run_{side}") or usual))


def _headline(a: Side, b: Side, tests: Tests, why: Sequence[Mismatch]) -> None:
    rows = contrast.headlines(a, b, tests)
    if why:
        page.section("These two can't be compared", compare.NOT_COMPARABLE)
        st.html(compare.reasons(why))
        st.html(compare.headline_table([contrast.apart(row) for row in rows]))
        return
    same = contrast.Finding("same", "Both sides are the same candidate of the same run")
    found = same if a.key == b.key else contrast.summary(rows)
    page.section(found.words, compare.PAIRED)
    st.html(compare.headline_table(rows))
    if a.key != b.key and not tests:
        words = "The sums per prompt are not stored (any more), so nothing can be paired."
        page.note(words)


def _facts(a: Side, b: Side) -> None:
    found = identities.facts(a, b)
    others = [fact for fact in found if fact.differs]
    known = f"{len(others)} of {len(found)} things that are known."
    page.section("What else differs", known)
    everything = flag("Show what is equal, too", "equal")
    shown = found if everything else others
    if shown:
        st.html(compare.fact_table(shown))
    else:
        page.say("Nothing: settings, digests and versions are equal.")
