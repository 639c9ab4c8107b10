"""Pages as tests open them: by Streamlit's own test runner, pressed as a person does, read as text."""

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import streamlit as st
from streamlit.testing.v1 import AppTest

from quantwatch_dashboard import views
from quantwatch_dashboard.roles import Person

TIMEOUT_S = 120
AsPerson = Callable[..., Person]
"""Lets somebody with a role, a name and a way in look from now on: the fixture `as_person`."""


@cache
def menu() -> dict[str, str]:
    """Return the pages of the menu, address → module, in its order."""

    # Outside of a running app Streamlit makes pages that know neither their address nor their view.
    def page(show: Any, **about: str) -> tuple[str, str]:
        return about["url_path"], show.__module__

    with patch.object(st, "Page", page):
        return dict(views.pages())


def open_page(name: str, **query: str) -> AppTest:
    """Run the page at an address with its query parameters; none may ever show an exception."""
    script = f"from {menu()[name]} import show\nshow()"
    page = AppTest.from_string(script, default_timeout=TIMEOUT_S)
    for key, value in query.items():
        page.query_params[key] = value
    return again(page)


def fresh_page(name: str, **query: str) -> AppTest:
    """Run a page that has forgotten what it read before."""
    st.cache_resource.clear()
    return open_page(name, **query)


def again(page: AppTest) -> AppTest:
    """Run a page once more, as a press or a new choice does; no exception may come of it."""
    page.run()
    assert not page.exception, page.exception
    return page


def press(page: AppTest, *labels: str) -> AppTest:
    """Press the first button of each label, one after the other."""
    for label in labels:
        button = next(one for one in page.button if one.label == label)
        assert not button.disabled, f"{label!r} can't be pressed"
        button.click()
        again(page)
    return page


def press_key(page: AppTest, *keys: str) -> AppTest:
    """Press buttons by their keys, one after the other."""
    for key in keys:
        page.button(key=key).click()
        again(page)
    return page


def html(page: AppTest) -> str:
    """Return all markup of a page except its style."""
    found = [element.proto.body for element in page.get("html")]
    return "\n".join(body for body in found if not body.startswith("<style>"))


def boxes(page: AppTest) -> dict[str, str]:
    """Return what is chosen in each select box, by label."""
    return {box.label: str(box.value) for box in page.selectbox}


def figures(page: AppTest) -> list[str]:
    """Return the charts of a page as the JSON that its browser gets."""
    return [chart.proto.spec for chart in page.get("plotly_chart")]
