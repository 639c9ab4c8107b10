"""Buttons that do something: off without the role, asked about first, done once, told in words."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from tests.dashboard.pages import AsPerson, html, press

from quantwatch.errors import StoreError
from quantwatch_dashboard import clock
from quantwatch_dashboard.components import asking
from quantwatch_dashboard.roles import How, Role

NOW = datetime(2026, 11, 30, 1, tzinfo=UTC)
DONE: list[tuple[str, ...]] = []
PAGE = """
from quantwatch_dashboard.components import asking
from quantwatch_dashboard.roles import Role
from tests.dashboard import test_dashboard_asking as tests

asking.button("Run now", lambda who: tests.note(who.name, asking.once("run")), key="run",
              done=lambda given: f"Run {given} waits.")
asking.button("Release", lambda who: tests.note(who.name), key="release", needs=Role.ADMIN,
              ask="It may kill its <b>worker</b> again.", done="Released.")
asking.worded("Pause", lambda who, why: tests.note(who.name, why), key="pause",
              wants="Why", done="Paused.")
"""


def note(*words: str) -> str:
    """What the page's buttons do."""
    if "fail" in words:
        raise StoreError("Database x is read-only; make <it> writable")
    DONE.append(words)
    return "01JX"


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    DONE.clear()
    yield
    DONE.clear()


@pytest.fixture
def page(as_person: AsPerson) -> Any:
    """Return the page as somebody with a role sees it."""

    def opened(role: Role, how: How = How.SIGNED_IN) -> AppTest:
        as_person(role, how=how)
        found = AppTest.from_string(PAGE, default_timeout=60).run()
        assert not found.exception
        return found

    return opened


OFF = {
    Role.NONE: ({"Run now", "Release", "Pause"}, "you have none"),
    Role.VIEWER: ({"Run now", "Release", "Pause"}, "yours is viewer"),
    Role.OPERATOR: ({"Release"}, "yours is operator"),
    Role.ADMIN: (set(), ""),
}


@pytest.mark.parametrize("role", OFF, ids=str)
def test_buttons_without_the_role_are_off_and_say_why(page: Any, role: Role) -> None:
    """Catches a button that vanishes, or one that fails only after it was pressed."""
    off, why = OFF[role]
    shown = page(role)

    assert {one.label for one in shown.button if one.disabled} == off
    assert all(why in one.help for one in shown.button if one.disabled)


def test_what_it_takes_where_no_sign_in_is_configured(page: Any) -> None:
    """Catches somebody who is told to ask for a role where nobody can have one."""
    shown = page(Role.VIEWER, How.OPEN)
    assert all("No sign-in is configured" in one.help for one in shown.button)


def test_pressing_does_it_and_says_so(page: Any) -> None:
    """Catches a press without an answer."""
    shown = press(page(Role.OPERATOR), "Run now")

    assert [words[0] for words in DONE] == ["ann"]
    assert "Run 01JX waits." in html(shown)


def test_a_double_click_has_one_key_and_a_later_press_another(
    page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches two runs of one click, and a button that works only once a day."""
    shown = page(Role.OPERATOR)
    for seconds in (0, 2, 60):
        now = NOW + timedelta(seconds=seconds)
        monkeypatch.setattr(clock, "now", lambda now=now: now)
        press(shown, "Run now")

    first, again, later = (words[1] for words in DONE)
    assert first == again != later
    assert all(8 <= len(key) <= 255 for key in (first, later))


def test_a_key_is_kept_until_it_worked(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second run after a failure of which nobody knows whether it was one."""
    shown = page(Role.OPERATOR)
    keys = []

    def failing(_: str, key: str) -> str:
        keys.append(key)
        raise StoreError("The server can't be reached; start it")

    monkeypatch.setattr("tests.dashboard.test_dashboard_asking.note", failing)
    for minutes in (0, 5):
        now = NOW + timedelta(minutes=minutes)
        monkeypatch.setattr(clock, "now", lambda now=now: now)
        press(shown, "Run now")
        assert "can&#x27;t be reached" in html(shown)
    assert keys[0] == keys[1]


def test_what_can_not_be_undone_is_asked_first(page: Any) -> None:
    """Catches one press that does it, a question that can't be left, and markup from elsewhere."""
    shown = press(page(Role.ADMIN), "Release …")
    assert "It may kill its &lt;b&gt;worker&lt;/b&gt; again." in html(shown)
    assert DONE == []
    press(shown, "Not now")
    assert "worker" not in html(shown)
    press(press(shown, "Release …"), "Release")

    assert DONE == [("ann",)]
    assert "Released." in html(shown)
    assert "Release …" in {one.label for one in shown.button}


def test_words_are_handed_over_and_errors_are_sentences(page: Any) -> None:
    """Catches an error box, an error as markup, and words that are lost when it failed."""
    shown = press(page(Role.OPERATOR), "Pause …")
    shown.text_input[0].input("fail").run()
    press(shown, "Pause")
    assert "Database x is read-only; make &lt;it&gt; writable" in html(shown)
    assert 'role="alert"' in html(shown)
    assert shown.text_input[0].value == "fail"

    shown.text_input[0].input("moving racks").run()
    press(shown, "Pause")
    assert DONE == [("ann", "moving racks")]
    assert "Paused." in html(shown)
    assert "read-only" not in html(shown)


def test_the_answer_goes_away(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches “Paused.” over a check that somebody else has resumed since."""
    monkeypatch.setattr(clock, "now", lambda: NOW)
    shown = press(page(Role.OPERATOR), "Run now")
    monkeypatch.setattr(clock, "now", lambda: NOW + timedelta(minutes=2))

    assert "waits" not in html(shown.run())


def test_a_role_that_was_lost_meanwhile_does_nothing(page: Any, as_person: AsPerson) -> None:
    """Catches an open page that goes on acting after its sign-in has ended."""
    shown = page(Role.OPERATOR)
    nobody = as_person(Role.NONE, "anonymous", How.EXPIRED)
    press(shown, "Run now")

    # The act is told who presses now, and `actions` refuse; nothing is remembered from before.
    assert [words[0] for words in DONE] == ["anonymous"]
    assert asking.hint(nobody, Role.OPERATOR) == "Needs the role operator; you have none."
