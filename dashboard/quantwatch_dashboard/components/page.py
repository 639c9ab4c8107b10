"""What every page has: the style, a head, section titles."""

from functools import cache
from pathlib import Path

import streamlit as st

from quantwatch_dashboard import clock
from quantwatch_dashboard.components.markup import Html, tag

_READ = "Read from the database at this time, give or take 15 seconds. Reload for newer data."


@cache
def _style() -> str:
    return f"<style>{Path(__file__).with_name('style.css').read_text(encoding='utf-8')}</style>"


def begin() -> None:
    """Put the app's style on the page; every view calls it first."""
    st.html(_style())


def head(title: object, *beside: object) -> None:
    """Show the page's title and, in grey beside it, where one is and when this was read."""
    now = clock.now().astimezone(clock.zone())
    read = tag("span", f"as of {now:%H:%M:%S %Z}", class_="qw-asof", title=_READ)
    where = tag("span", *beside, class_="qw-soft qw-wrap")
    st.html(tag("div", tag("h1", title), where, read, class_="qw-head"))


def say(words: object) -> None:
    """Say something beside the matter: that there is nothing, what is left out."""
    st.html(tag("p", words, class_="qw-soft"))


def hint(*words: object) -> None:
    """Say how to read what stands above or below."""
    st.html(tag("p", *words, class_="qw-soft qw-small"))


def note(words: object) -> None:
    """Say what a reader should not miss."""
    st.html(tag("p", words, class_="qw-note"))


def section(title: str, explanation: object = "") -> None:
    """Show a section's title and a sentence on what it shows and how to read it."""
    st.html(
        tag(
            "div",
            tag("h2", title),
            tag("p", explanation) if explanation else Html(""),
            class_="qw-section",
        )
    )
