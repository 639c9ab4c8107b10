"""Reading ends with the role for it, also where only a part of the page is drawn, and no page."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest
from tests.dashboard.pages import AsPerson

import quantwatch_dashboard
from quantwatch_dashboard import access, clock
from quantwatch_dashboard.roles import AccessError, How, Role

VIEWS = Path(quantwatch_dashboard.__file__).parent / "views"
PAGE = """
import streamlit as st
from quantwatch_dashboard.components import trouble

@trouble.guarded
def part():
    st.write("their prompts")

drawn = st.session_state["drawn"] = st.session_state.get("drawn", 0) + 1
if drawn == 1:
    part()
else:
    st.write("the door")
"""
AUTH = {"redirect_uri": "x", "cookie_secret": "0" * 32, "client_id": "a"}
ROLES = 'schema_version = 1\n[dashboard.roles]\nviewer = ["{}"]\n'


@pytest.mark.parametrize("role", [Role.NONE, Role.VIEWER], ids=str)
def test_a_part_of_a_page_asks_whether_one_may_still_look(as_person: AsPerson, role: Role) -> None:
    """Catches an open tab that goes on reading: what redraws itself does not pass the door."""
    as_person(role, how=How.EXPIRED)
    page = AppTest.from_string(PAGE, default_timeout=60).run()

    assert not page.exception
    wanted = "their prompts" if role is Role.VIEWER else "the door"
    assert [one.value for one in page.markdown] == [wanted]


def test_every_part_that_redraws_itself_asks() -> None:
    """Catches a new fragment that nobody guards."""
    lines = [line for path in VIEWS.glob("*.py") for line in path.read_text().splitlines()]
    after = [lines[i + 1] for i, line in enumerate(lines) if line.startswith("@st.fragment")]

    assert len(after) > 5
    assert set(after) == {"@trouble.guarded"}


@pytest.fixture
def download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], bytes]:
    """A file offered on the page of a viewer, to be made where Streamlit knows of nobody."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QUANTWATCH_CONFIG", raising=False)
    (tmp_path / "quantwatch.toml").write_text(ROLES.format("bob@example.com"))
    claims: dict[str, Any] = {"email": "bob@example.com", "email_verified": True}
    claims["exp"] = time.time() + 60
    monkeypatch.setattr(access, "_auth_section", lambda: AUTH)
    monkeypatch.setattr(access, "_claims", lambda: claims)
    made = access.for_readers(lambda: b"rows")
    monkeypatch.setattr(access, "_claims", lambda: None)
    return made


def test_a_file_is_made_for_whoever_may_read(download: Callable[[], bytes]) -> None:
    """Catches a door that is shut for everybody: a file is made outside of any page."""
    assert download() == b"rows"


def test_no_file_after_the_sign_in_has_ended(
    download: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches downloads of a run by a tab that was left open."""
    later = time.time() + 61
    monkeypatch.setattr("quantwatch_dashboard.access.time.time", lambda: later)
    with pytest.raises(AccessError, match="Downloading needs the role viewer"):
        download()


def test_no_file_after_the_role_was_taken_away(
    download: Callable[[], bytes], tmp_path: Path
) -> None:
    """Catches a role that lives as long as its tab."""
    (tmp_path / "quantwatch.toml").write_text(ROLES.format("carol@example.com"))
    os.utime(tmp_path / "quantwatch.toml", ns=(1, 1))
    with pytest.raises(AccessError):
        download()


@pytest.mark.parametrize("told", ["Europe", "x" * 500, "../etc", "No/Such", None], ids=str)
def test_an_unknown_zone_is_utc(monkeypatch: pytest.MonkeyPatch, told: str | None) -> None:
    """Catches an error on each page by the name of a folder, or one that is too long for a file."""
    monkeypatch.setattr(type(st.context), "timezone", told)
    assert clock.zone().utcoffset(clock.now()) == clock.now().utcoffset()
