"""What came of a button whose thing is no longer listed: a cancelled run leaves the queue."""

from collections.abc import Sequence

import streamlit as st

from quantwatch_dashboard.components import asking

_MOST = 100


def show(kind: str, keys: Sequence[str]) -> None:
    """Show it for things that were listed before and are not among these buttons any more."""
    place = f"listed-{kind}"
    known: tuple[str, ...] = st.session_state.get(place, ())
    for key in known:
        if key not in keys:
            asking.show_said(key)
    st.session_state[place] = tuple(dict.fromkeys([*keys, *known]))[:_MOST]
