"""Silences: those that hold, and a form that shows what one would match before it is made."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from glob import escape

import streamlit as st

from quantwatch.alerts.silences import LABELS
from quantwatch.config.durations import seconds
from quantwatch.errors import UserError
from quantwatch.store.silences import StoredSilence
from quantwatch_dashboard import actions, clock, text
from quantwatch_dashboard.components import alerts_silence, answers, asking, page
from quantwatch_dashboard.logic.episodes import ShownEpisode, would_match
from quantwatch_dashboard.queries import alerts as alert_queries
from quantwatch_dashboard.roles import Person

_END = "unsilence-"
_LENGTHS = ("2h", "8h", "1d", "3d", "7d")


def show(url: str) -> None:
    """Show the silences that hold, and let the reader make one."""
    page.section(
        "Silences that hold now",
        "What they match is still judged and kept; nobody is notified before they end.",
    )
    found = alert_queries.active_silences(url)
    _list(url, found)
    if not found:
        page.say("There is none: of every alert that fires its endpoints are notified.")
    page.section(
        "New silence",
        "Globs: * is any text. A label that is left empty is not looked at; case matters.",
    )
    with st.container(border=True):
        form(url, {}, "new")


def matching(url: str, one: ShownEpisode) -> None:
    """Show the silence that keeps an episode quiet, with the button that ends it."""
    _list(url, () if one.silence is None else (one.silence,))


def form(url: str, labels: Mapping[str, str], key: str) -> None:
    """Let the reader choose globs, length and comment; say what they would match."""
    for label, column in zip(LABELS, st.columns(2) * 2, strict=True):
        usual = escape(labels.get(label, "")) if label != "severity" else ""
        with column:
            st.text_input(label.capitalize(), usual, key=f"silence-{label}-{key}", max_chars=200)
    st.selectbox("For", _LENGTHS, 1, key=f"silence-for-{key}", accept_new_options=True,
                 help="Or write another length, as in 36h or 1d12h.")  # fmt: skip
    st.text_input("Why, for the others", key=f"silence-why-{key}", max_chars=500)
    _preview(url, _matcher(key))
    asking.button("Silence", lambda who: _make(who, key), key=f"silence-{key}", done=_made)


def _preview(url: str, matcher: Mapping[str, str]) -> None:
    """List what a silence would match of what is open now."""
    if not matcher:
        page.hint("Fill in at least one label.")
        return
    listed = [one.listed for one in alert_queries.open_episodes(url)]
    st.html(alerts_silence.preview(would_match(matcher, listed), len(listed)))


def _matcher(key: str) -> dict[str, str]:
    given = {label: str(st.session_state.get(f"silence-{label}-{key}") or "") for label in LABELS}
    return {label: glob.strip() for label, glob in given.items() if glob.strip()}


def _make(who: Person, key: str) -> StoredSilence:
    """Make what the form says at the moment of the press, which may be newer than the page."""
    given = str(st.session_state.get(f"silence-for-{key}") or "")
    try:
        length = timedelta(seconds=seconds(given))
    except ValueError as error:
        raise UserError(str(error)) from None
    comment = str(st.session_state.get(f"silence-why-{key}") or "")
    return actions.silence(who, _matcher(key), length, comment)


def _made(found: object) -> str:
    assert isinstance(found, StoredSilence)
    return f"Silence {found.id} holds until {text.instant(found.ends_at, clock.zone())}."


def _list(url: str, found: Sequence[StoredSilence]) -> None:
    """Show silences, and what came of ending one whose button is gone with it."""
    answers.show("silences", [f"{_END}{silence.id}" for silence in found])
    for silence in found:
        _silence(url, silence)


def _silence(url: str, silence: StoredSilence) -> None:
    listed = [one.listed for one in alert_queries.open_episodes(url)]
    count = len(would_match(silence.matcher, listed))
    with st.container(border=True):
        st.html(alerts_silence.silence(silence, count, clock.now(), clock.zone()))
        asking.button(
            "End it now",
            lambda who: actions.unsilence(who, silence.id),
            key=f"{_END}{silence.id}",
            done="The silence has ended; its endpoints are notified of what still fires.",
        )
