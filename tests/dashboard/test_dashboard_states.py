"""Every page of the menu in every state that a database, or an address, may be in."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest
from tests.dashboard.pages import again, figures, html, menu, open_page
from tests.dashboard.states import STATES, make

MAX_FIGURE = 2_000_000
"""Characters: what a browser gets for one chart, whatever the data."""
MARKUP = re.compile("<script|<img src=x|<b>(bad|off)|href=.javascript")
MARKDOWN = re.compile(r"javascript:|:red\[|\$x\$|\*\*b")
"""What the hostile database holds, where Streamlit would render it."""


@pytest.fixture(scope="module")
def state_url(
    migrated_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """Databases in each state, made when first asked for; pages only read them."""
    made: dict[str, str] = {}

    def url(name: str) -> str:
        if name not in made:
            made[name] = make(STATES[name], migrated_file, tmp_path_factory.mktemp("state"))
        return made[name]

    yield url
    st.cache_resource.clear()


def markdown(page: AppTest) -> str:
    """Return whatever Streamlit takes for Markdown: text, and the labels and hints of widgets."""
    said = [element.value for element in (*page.markdown, *page.caption)]
    buttons = [words for button in page.button for words in (button.label, button.help or "")]
    widgets = (*page.selectbox, *page.toggle, *page.number_input, *page.slider, *page.text_input)
    return "\n".join((*said, *buttons, *(widget.label for widget in widgets)))


@pytest.mark.parametrize("name", menu())
@pytest.mark.parametrize("state", STATES)
def test_every_page_in_every_state(
    name: str, state: str, state_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a traceback, an empty box, a figure that freezes the browser, a password on the
    page, and text from the database that becomes markup."""
    given, url = STATES[state], state_url(state)
    monkeypatch.setenv("QUANTWATCH_DATABASE_URL", url)
    page = open_page(name, **given.query)
    shown = html(page)

    said = [words.format(url=url) for words in given.on.get(name, given.said)]
    assert [words for words in said if words not in shown] == []
    assert ("<h1>" in shown) or ("qw-state" in shown)
    assert shown.count("can&#x27;t be read") <= 1, "one card, not one for each part of the page"
    assert re.search(r"as of \d\d:\d\d:\d\d UTC", shown) or "<h1>" not in shown
    assert [len(figure) for figure in figures(page) if len(figure) > MAX_FIGURE] == []
    assert MARKUP.findall("\n".join((shown, *figures(page)))) == []
    assert MARKDOWN.findall(markdown(page)) == []
    assert not re.search("Traceback|hunter2", shown)


@pytest.mark.parametrize("name", menu())
def test_a_database_that_goes_while_the_page_is_open(
    name: str,
    state_url: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Catches a traceback, or last night's numbers, on a page that stays open."""
    monkeypatch.setenv("QUANTWATCH_DATABASE_URL", state_url("one run"))
    page = open_page(name)
    assert "can&#x27;t be read" not in html(page)
    monkeypatch.setenv("QUANTWATCH_DATABASE_URL", f"sqlite:///{tmp_path}/gone.db")
    st.cache_resource.clear()

    assert html(again(page)).count("does not exist yet") == 1
