"""Widgets whose state is in the page's address, so that a link restores it."""

from collections.abc import Callable, Sequence

import streamlit as st


def pick(
    label: str, key: str, options: Sequence[str], default: str, shown: Callable[[str], str] = str
) -> str:
    """Let the reader choose; an address with something else than an option shows the default.

    The address wins over the widget when it was changed from outside (a link, the back button).
    """
    chosen, seen = f"pick-{key}", f"seen-{key}"
    address = st.query_params.get(key)
    if address != st.session_state.get(seen, "") or st.session_state.get(chosen) not in options:
        st.session_state[chosen] = address if address in options else default
    value = str(st.selectbox(label, options, key=chosen, format_func=shown))
    st.query_params[key] = value
    st.session_state[seen] = value
    return value


def flag(label: str, key: str) -> bool:
    """Let the reader switch something on; the address has `key=1` while it is on."""
    chosen, seen = f"flag-{key}", f"seen-{key}"
    address = st.query_params.get(key)
    if address != st.session_state.get(seen) or chosen not in st.session_state:
        st.session_state[chosen] = address == "1"
    on = st.toggle(label, key=chosen)
    if on:
        st.query_params[key] = "1"
    else:
        st.query_params.pop(key, None)
    st.session_state[seen] = "1" if on else None
    return on
