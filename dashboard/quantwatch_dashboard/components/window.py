"""Which token of a prompt, and which stretch of it is shown token by token, both in the address.

What the address says wins when it was changed from outside; another prompt starts afresh. Numbers
beyond the prompt are moved into it.
"""

from typing import Any

import streamlit as st

WIDTH = 192
"""So many tokens have labels that can be read."""
_SHORT = 24
"""A prompt with fewer tokens needs no stretch."""
_LONGEST = 2_000


def position(first: int, last: int, default: int, prompt: int) -> int:
    """Let the reader choose one token by its position; `token` in the address."""
    if first == last:
        return first
    known, seen = "chosen-token", "seen-token"
    address = st.query_params.get("token")
    before = st.session_state.get(seen)
    if before is not None and before[0] != prompt and before[1] == address:
        address = None
    if before != (prompt, address) or not _inside(st.session_state.get(known), first, last):
        given = _number(address)
        st.session_state[known] = default if given is None else min(max(given, first), last)
    at = int(
        st.number_input(
            "Token", first, last, step=1, key=known,
            help="Its position in the prompt. A click on a picture or on a row chooses one, too.",
        )
    )  # fmt: skip
    st.query_params["token"] = str(at)
    st.session_state[seen] = (prompt, str(at))
    return at


def stretch(ends: tuple[int, int], around: int, prompt: int) -> tuple[int, int]:
    """Let the reader choose the stretch that is shown, by default around the chosen token.

    `from` and `to` in the address; at most `_LONGEST` tokens.
    """
    first, last = ends
    if last - first < _SHORT:
        return first, last
    usual = _usual(first, last, around)
    _remember(ends, usual, around, prompt)
    chosen: Any = st.slider(
        "Tokens shown", first, last, key="window",
        help="Drag both ends, or move them with the arrow keys. The chosen token is always in it "
        "until you move them.",
    )  # fmt: skip
    left, right = int(chosen[0]), min(int(chosen[1]), int(chosen[0]) + _LONGEST - 1)
    if (left, right) == usual:
        for name in ("from", "to"):
            st.query_params.pop(name, None)
    else:
        st.query_params["from"], st.query_params["to"] = str(left), str(right)
    st.session_state["seen-window"] = (prompt, *_address())
    return left, right


def _remember(ends: tuple[int, int], usual: tuple[int, int], around: int, prompt: int) -> None:
    """Set the slider from the address when that is new, else leave it where the reader put it."""
    address, before = _address(), st.session_state.get("seen-window")
    known: Any = st.session_state.get("window")
    valid = isinstance(known, tuple) and all(_inside(end, *ends) for end in known)
    if before is not None and before[0] != prompt and before[1:] == address:
        st.session_state["window"] = usual
    elif before != (prompt, *address) or not valid:
        st.session_state["window"] = _given(*ends) or usual
    elif address == (None, None) and not known[0] <= around <= known[1]:
        st.session_state["window"] = usual


def _address() -> tuple[str | None, str | None]:
    return st.query_params.get("from"), st.query_params.get("to")


def _usual(first: int, last: int, around: int) -> tuple[int, int]:
    if last - first < 2 * WIDTH:
        return first, last
    left = min(max(first, around - WIDTH // 2), last - WIDTH + 1)
    return left, left + WIDTH - 1


def _given(first: int, last: int) -> tuple[int, int] | None:
    """Return what the address asks for, None when that is nothing or no two numbers."""
    found = [_number(word) for word in _address()]
    if None in found:
        return None
    left, right = sorted(min(max(number or 0, first), last) for number in found)
    return left, min(right, left + _LONGEST - 1)


def _number(word: str | None) -> int | None:
    plain = word is not None and word.isascii() and word.isdecimal() and len(word) < 10
    return int(word) if plain and word is not None else None


def _inside(known: object, first: int, last: int) -> bool:
    return isinstance(known, int) and first <= known <= last
