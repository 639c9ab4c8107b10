"""Parts of a page of which one is shown; which one is in the address."""

from collections.abc import Sequence

import streamlit as st


def choose(key: str, names: Sequence[str]) -> str:
    """Let the reader choose a part; an address with another word shows the first.

    The address wins over the widget when it was changed from outside (a link, the back button).
    """
    chosen, seen = f"part-{key}", f"seen-{key}"
    address = st.query_params.get(key)
    if address != st.session_state.get(seen, "") or st.session_state.get(chosen) not in names:
        st.session_state[chosen] = address if address in names else names[0]
    value = str(
        st.segmented_control("Show", names, key=chosen, label_visibility="collapsed", required=True)
    )
    st.query_params[key] = value
    st.session_state[seen] = value
    return value
