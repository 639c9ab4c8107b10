"""What is under way, asked for again every few seconds, without drawing the page anew."""

from collections.abc import Iterable

import streamlit as st

from quantwatch.store.states import UnendedRun
from quantwatch_dashboard import clock
from quantwatch_dashboard.components import live, trouble
from quantwatch_dashboard.queries import overview
from quantwatch_dashboard.queries.forgetting import forget_standings

_EVERY_S = 3


def show(url: str, check: str | None = None) -> None:
    """Show the runs under way, of one check or of all. When one begins or ends, all is redrawn."""
    _live(url, check, _ids(_shown(overview.running(url), check)))


@st.fragment(run_every=_EVERY_S)
@trouble.guarded
def _live(url: str, check: str | None, known: frozenset[str]) -> None:
    shown = _shown(overview.running(url), check)
    if (now := _ids(shown)) != known:
        forget_standings(known, now)
        st.rerun()
    st.html(live.cards(shown, clock.now()))


def _shown(found: Iterable[UnendedRun], check: str | None) -> list[UnendedRun]:
    return [run for run in found if check in (None, run.check)]


def _ids(found: Iterable[UnendedRun]) -> frozenset[str]:
    return frozenset(run.run_id for run in found)
