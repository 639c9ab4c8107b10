"""Buttons that do something: off without the role, a step to confirm, the result as a sentence.

    asking.button("Run now", lambda who: actions.run_now(who, check, asking.once(f"run-{check}")),
                  key=f"run-{check}", done=lambda run: f"Run {run.run_id} waits for a worker.")
    asking.button("Unpin", lambda who: actions.unpin(who, check), key=f"unpin-{check}",
                  ask="Later runs are compared with nothing.", done="No baseline is pinned.")
    asking.worded("Pause", lambda who, why: actions.pause(who, check, why), key=f"pause-{check}",
                  wants="Why, for the others", done="Paused.")

`key` is unique on the page and names what it is about. The act is carried out before the page is
drawn again, so the whole page shows what it led to.
"""

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import streamlit as st

from quantwatch.errors import QuantwatchError
from quantwatch_dashboard import access, clock
from quantwatch_dashboard.components.markup import Html, tag
from quantwatch_dashboard.queries.forgetting import forget
from quantwatch_dashboard.roles import How, Person, Role

_log = logging.getLogger(__name__)
_SAME_PRESS = timedelta(seconds=10)
_SHOWN = timedelta(seconds=60)

Done = str | Callable[[object], str]
"""What is said afterwards: a sentence, or a function from what the act returned."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What came of pressing a button."""

    words: str
    failed: bool
    at: datetime


@dataclass(frozen=True, slots=True)
class _Once:
    """An idempotency key, and when something was done with it."""

    value: str
    used_at: datetime | None = None


def button(
    label: str,
    act: Callable[[Person], object],
    *,
    key: str,
    needs: Role = Role.OPERATOR,
    ask: str | None = None,
    done: Done = "Done.",
) -> None:
    """Show a button that carries out `act`; with `ask`, what can't be undone, it is asked first."""
    if not _allowed(label, key, needs):
        return
    carry = (key, lambda person, _: act(person), done)
    if ask is None:
        st.button(label, key=f"do-{key}", on_click=_carry_out, args=carry)
    elif _opened(label, key):
        with st.container(border=True):
            st.html(tag("p", ask, class_="qw-ask"))
            _confirm(label, key, carry)
    show_said(key)


def off(label: str, key: str, why: str) -> None:
    """Show a button that is off for everybody, and says why."""
    st.button(label, key=f"off-{key}", disabled=True, help=why)


def worded(
    label: str,
    act: Callable[[Person, str], object],
    *,
    key: str,
    wants: str,
    needs: Role = Role.OPERATOR,
    done: Done = "Done.",
) -> None:
    """Show a button that asks for words (a reason, a comment) and hands them to `act`."""
    if not _allowed(label, key, needs):
        return
    if _opened(label, key):
        with st.container(border=True):
            st.text_input(wants, key=f"words-{key}", max_chars=500)
            _confirm(label, key, (key, act, done))
    show_said(key)


def once(key: str) -> str:
    """Return the idempotency key of a button: the same until it worked, and shortly after.

    A double click sends two presses; the second may come after the first has succeeded.
    """
    place, now = f"once-{key}", clock.now()
    known = st.session_state.get(place)
    if known is None or (known.used_at is not None and now - known.used_at > _SAME_PRESS):
        known = st.session_state[place] = _Once(uuid.uuid4().hex)
    return str(known.value)


def hint(person: Person, needs: Role) -> str:
    """Return why a button is off for somebody."""
    if person.how is How.OPEN:
        return f"Needs the role {needs.word}. No sign-in is configured, so nobody here has it."
    own = "you have none" if person.role is Role.NONE else f"yours is {person.role.word}"
    return f"Needs the role {needs.word}; {own}."


def show_said(key: str) -> None:
    """Show what came of pressing a button lately."""
    said = st.session_state.get(f"said-{key}")
    if said is not None and clock.now() - said.at < _SHOWN:
        st.html(_words(said))


def _words(said: _Said) -> Html:
    role, class_ = ("alert", "qw-said qw-hot") if said.failed else ("status", "qw-said")
    return tag("p", said.words[:1].upper() + said.words[1:], class_=class_, role=role)


def _allowed(label: str, key: str, needs: Role) -> bool:
    """Show a button that is off, and say so, unless the person's role is high enough."""
    person = access.current()
    if person.may(needs):
        return True
    st.button(label, key=f"off-{key}", disabled=True, help=hint(person, needs))
    return False


def _opened(label: str, key: str) -> bool:
    """Say whether the question is open; show the button that opens it otherwise."""
    if st.session_state.get(f"open-{key}", False):
        return True
    st.button(f"{label} …", key=f"ask-{key}", on_click=_set_open, args=(key, True))
    return False


def _set_open(key: str, opened: bool) -> None:
    st.session_state[f"open-{key}"] = opened
    st.session_state.pop(f"said-{key}", None)


def _confirm(label: str, key: str, carry: tuple[object, ...]) -> None:
    with st.container(horizontal=True):
        st.button(label, key=f"do-{key}", type="primary", on_click=_carry_out, args=carry)
        st.button("Not now", key=f"no-{key}", on_click=_set_open, args=(key, False))


def _carry_out(key: str, act: Callable[[Person, str], object], done: Done) -> None:
    """Do it, as whoever the person is now, and keep what is to be said about it."""
    words = str(st.session_state.get(f"words-{key}", ""))
    try:
        result = act(access.current(), words)
    except QuantwatchError as error:
        _log.warning("an action on the dashboard failed: %s", error)
        st.session_state[f"said-{key}"] = _Said(str(error), True, clock.now())
        return
    if (used := st.session_state.get(f"once-{key}")) is not None:
        st.session_state[f"once-{key}"] = _Once(used.value, clock.now())
    said = done if isinstance(done, str) else done(result)
    st.session_state[f"said-{key}"] = _Said(said, False, clock.now())
    st.session_state[f"open-{key}"] = False
    forget()
