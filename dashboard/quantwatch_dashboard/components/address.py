"""Widgets whose state is in the page's address, so that a link restores it.

The address wins over the widget when it was changed from outside: a link, the back button. What it
names and nothing is called stays in it, and the reader is told: a wider list must not pass for a
narrow one. What is at its default leaves no trace in it, but for `pick`, and for `choose` with
`moves`: there the default comes from what was measured, and a link must show the same tomorrow.
Streamlit drops the state of widgets when another page is opened, so pages may use the same key for
different things.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import streamlit as st

from quantwatch.errors import UserError
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.text import ANY

Words = Callable[[str], str]
Width = int | Literal["stretch"]


def given(value: str) -> str | None:
    """Return what a filter asks for, None when it leaves nothing out."""
    return None if value == ANY else value


def every(what: str, shown: Words = str) -> Words:
    """Return how the options of a filter are called: without one it is ``all checks``."""
    return lambda name: f"all {what}" if name == ANY else shown(name)


def pick(label: str, key: str, options: Sequence[str], default: str, shown: Words = str) -> str:
    """Let the reader choose; an address with something else than an option shows the default.

    The choice is always written into the address.
    """
    name = _take("pick", key, options, default)
    value = str(st.selectbox(label, options, key=name, format_func=shown))
    return _keep(key, value)


def choose(
    label: str,
    key: str,
    options: Sequence[str],
    shown: Words = str,
    width: Width = 170,
    *,
    moves: bool = False,
) -> str:
    """Let the reader choose one of a list; the first option is the default.

    With `moves` the default is another one tomorrow: the address keeps it, too.
    """
    asked = st.query_params.get(key, options[0])
    name = _take("filter", key, options, options[0])
    value = str(st.selectbox(label, options, key=name, format_func=shown, width=width))
    if asked in options or value != options[0]:
        return _keep(key, value, "" if moves else options[0])
    st.session_state[f"seen-{key}"] = asked
    said = f"“{asked}” is not among these; shown: {shown(value)}"
    st.html(tag("span", said, class_="qw-note qw-small"), width="content")
    return value


def chosen_now(key: str) -> str:
    """Return what a filter holds at the moment of a press, which may be newer than the page.

    Raises UserError when it is gone.
    """
    value = st.session_state.get(f"filter-{key}")
    if value is None:
        raise UserError("What was chosen is no longer there; look at the page again.")
    return str(value)


def pills(label: str, key: str, options: Sequence[str], shown: Words) -> str:
    """Let the reader choose by buttons; the first option is the default. Labels are Markdown."""
    name = _take("filter", key, options, options[0])
    value = st.pills(
        label, options, key=name, format_func=shown, required=True, label_visibility="collapsed"
    )
    return _keep(key, str(value or options[0]), options[0])


def tabs(titles: Mapping[str, str]) -> str:
    """Let the reader choose a part of the page, `show` in the address; the first is the default."""
    options = list(titles)
    name = _take("filter", "show", options, options[0])
    value: Any = st.segmented_control(
        "Show", options, key=name, format_func=titles.__getitem__, required=True,
        label_visibility="collapsed",
    )  # fmt: skip
    return _keep("show", str(value or options[0]), options[0])


def flag(label: str, key: str) -> bool:
    """Let the reader switch something on; the address has `key=1` while it is on."""
    chosen, address = f"flag-{key}", st.query_params.get(key, "")
    if address != st.session_state.get(f"seen-{key}", "") or chosen not in st.session_state:
        st.session_state[chosen] = address == "1"
    return _keep(key, "1" if st.toggle(label, key=chosen) else "", "") == "1"


def search(label: str, key: str, hint: str, width: int = 260) -> str:
    """Let the reader type words."""
    name, address = f"filter-{key}", st.query_params.get(key, "")
    if address != st.session_state.get(f"seen-{key}", "") or name not in st.session_state:
        st.session_state[name] = address
    value = st.text_input(
        label, key=name, type="search", placeholder=hint, max_chars=200, width=width
    )
    return _keep(key, (value or "").strip(), "")


def number_of_page(key: str, num_rows: int, size: int, of: object = None) -> int:
    """Let the reader turn pages; returns the page, 0 for the first. Nothing shows for one page.

    `of` is what the pages are of: with something else one begins at the first page.
    """
    num_pages = max(1, -(-num_rows // size))
    address, seen = st.query_params.get(key, "1"), st.session_state.get(f"seen-{key}", "1")
    turn, start = st.session_state.get(f"turn-{key}", (0, 1))
    if st.session_state.get(f"of-{key}", of) != of:
        turn, start = turn + 1, 1
    elif address != seen or st.session_state.get(f"filter-{key}-{turn}", 1) > num_pages:
        turn, start = turn + 1, _page(address)
    st.session_state[f"of-{key}"], st.session_state[f"turn-{key}"] = of, (turn, start)
    if num_pages == 1:
        _keep(key, "1", "1")
        return 0
    # Each jump is a widget of its own: this one can't be set from outside once it is there.
    name, default = f"filter-{key}-{turn}", min(max(1, start), num_pages)
    chosen = int(st.pagination(num_pages, default=default, key=name))
    _keep(key, str(chosen), "1")
    return chosen - 1


def _page(address: str) -> int:
    plain = address.isascii() and address.isdecimal() and len(address) < 7
    return int(address) if plain else 1


def _take(kind: str, key: str, options: Sequence[str], default: str) -> str:
    """Set the widget from the address when that is new; return the widget's key."""
    name, address = f"{kind}-{key}", st.query_params.get(key, default)
    is_new = address != st.session_state.get(f"seen-{key}", default)
    if is_new or st.session_state.get(name) not in options:
        st.session_state[name] = address if address in options else default
    return name


def _keep(key: str, value: str, default: str | None = None) -> str:
    """Write a value into the address, unless it is the default there."""
    if value == default:
        st.query_params.pop(key, None)
    else:
        st.query_params[key] = value
    st.session_state[f"seen-{key}"] = value
    return value
