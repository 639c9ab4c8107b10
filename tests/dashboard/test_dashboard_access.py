"""The gate before all pages: what Streamlit knows, in every state."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from tests.dashboard.pages import html

from quantwatch_dashboard import access, launch
from quantwatch_dashboard.roles import Visit

OWN = {"host": "localhost:8501", "origin": "http://localhost:8501"}
SECRET = "0123456789abcdef" * 4
PROVIDER = {"client_id": "a", "client_secret": "b", "server_metadata_url": "http://127.0.0.1:9/"}
AUTH: dict[str, Any] = {
    "redirect_uri": "http://localhost:8501/oauth2callback",
    "cookie_secret": SECRET,
    "example": PROVIDER,
}
ROLES = """
schema_version = 1
[dashboard]
anonymous = "none"
[dashboard.roles]
viewer = ["*@example.com"]
"""


@pytest.fixture(autouse=True)
def _served_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of its own: Streamlit looks for secrets there, and in the home folder."""
    for variable in ("HOME", "QUANTWATCH_CONFIG", "STREAMLIT_SECRETS_FILES"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    local = Visit("127.0.0.1", "127.0.0.1", OWN)
    monkeypatch.setattr(access, "_visit", lambda: local)
    monkeypatch.setattr(access, "who", lambda: "ann@box")


def app(auth: Any = None, **claims: Any) -> AppTest:
    """Run the whole app with a section [auth] and an identity."""
    found = AppTest.from_file(str(launch.app_path()), default_timeout=60)
    if auth is not None:
        found.secrets["auth"] = auth
    if claims:
        usual = {"is_logged_in": True, "email_verified": True, "exp": time.time() + 60}
        found.user = usual | claims
    found.run()
    assert not found.exception, found.exception
    return found


def labels(page: AppTest) -> list[str]:
    return [one.label for one in page.button]


def write_roles(tmp_path: Path, text: str = ROLES) -> None:
    (tmp_path / "quantwatch.toml").write_text(text)


@pytest.mark.slow
def test_at_this_machine_the_page_says_that_one_is_operator(empty_url: str) -> None:
    """Catches a role that nobody is told of."""
    shown = html(app())

    assert "You are operator: this page is served on this machine only" in shown
    assert "No check has run yet" in shown


def test_from_elsewhere_the_page_says_why_nothing_can_be_done(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches buttons that are off, and nobody knows why."""
    monkeypatch.setattr(access, "_visit", lambda: Visit(None, "10.0.0.1", {"host": "q.example"}))
    shown = html(app())

    assert "no sign-in is configured, and the server listens on all addresses" in shown
    assert "docs/operations.md, “Sign-in”" in shown
    assert "No check has run yet" in shown


def test_without_a_sign_in_nothing_is_shown(empty_url: str, tmp_path: Path) -> None:
    """Catches a page, or a query, before one has signed in."""
    write_roles(tmp_path)
    shown = app(AUTH)

    assert "Sign in to quantwatch" in html(shown)
    assert "No check has run yet" not in html(shown)
    assert labels(shown) == ["Sign in"]


def test_readers_need_no_sign_in_where_settings_say_so(empty_url: str, tmp_path: Path) -> None:
    """Catches `anonymous` without effect, or without a way to sign in."""
    write_roles(tmp_path, ROLES.replace('"none"', '"viewer"'))
    shown = app(AUTH)

    assert "No check has run yet" in html(shown)
    assert ">viewer<" in html(shown)
    assert labels(shown) == ["Sign in"]


def test_signed_in_with_a_role(empty_url: str, tmp_path: Path) -> None:
    """Catches a page that does not say who one is, or offers no way out."""
    write_roles(tmp_path)
    shown = app(AUTH, email="Bob@example.com")

    assert "bob@example.com" in html(shown)
    assert ">viewer<" in html(shown)
    assert labels(shown) == ["Sign out"]


def test_signed_in_without_a_role(empty_url: str, tmp_path: Path) -> None:
    """Catches a blank page where somebody needs to know what to ask for."""
    write_roles(tmp_path)
    shown = app(AUTH, email="<b>mallory</b>@evil.test")

    assert "You have no role here yet" in html(shown)
    assert "viewer = [&quot;&lt;b&gt;mallory&lt;/b&gt;@evil.test&quot;]" in html(shown)
    assert "No check has run yet" not in html(shown)
    assert labels(shown) == ["Sign out"]


def test_an_address_that_nobody_vouches_for(empty_url: str, tmp_path: Path) -> None:
    """Catches advice that would give a role to an address that is not theirs."""
    write_roles(tmp_path)
    shown = html(app(AUTH, email="bob@example.com", email_verified=False, sub="7"))

    assert "vouches for no e-mail address" in shown
    assert "bob@example.com" not in shown


def test_an_expired_sign_in(empty_url: str, tmp_path: Path) -> None:
    """Catches Streamlit's thirty days."""
    write_roles(tmp_path)
    shown = app(AUTH, email="bob@example.com", exp=time.time() - 1)

    assert "Your sign-in has expired" in html(shown)
    assert labels(shown) == ["Sign in"]


def test_a_role_is_lost_when_the_file_says_so(empty_url: str, tmp_path: Path) -> None:
    """Catches roles that hold until the next start."""
    write_roles(tmp_path)
    assert ">viewer<" in html(app(AUTH, email="bob@example.com"))
    write_roles(tmp_path, ROLES.replace("*@example.com", "carol@example.com"))
    os.utime(tmp_path / "quantwatch.toml", ns=(1, 1))
    assert "You have no role here yet" in html(app(AUTH, email="bob@example.com"))


BROKEN = {
    "no section": ("x", "auth is no section"),
    "empty": ({}, "no redirect_uri and no cookie_secret"),
    "no address": (AUTH | {"redirect_uri": ""}, "no redirect_uri"),
    "a short secret": (AUTH | {"cookie_secret": "changeme"}, "shorter than 32 characters"),
    "no provider": ({k: AUTH[k] for k in ("redirect_uri", "cookie_secret")}, "no provider"),
}


@pytest.mark.parametrize(("auth", "named"), BROKEN.values(), ids=BROKEN)
def test_a_broken_sign_in_lets_nobody_in(empty_url: str, auth: Any, named: str) -> None:
    """Catches a typing error that makes operators of everybody, or an identity that can be forged."""
    shown = html(app(auth, email="bob@example.com"))

    assert "The sign-in is not configured correctly" in shown
    assert named in shown
    assert "changeme" not in shown
    assert "No check has run yet" not in shown


def test_a_secrets_file_that_is_no_toml_lets_nobody_in(empty_url: str, tmp_path: Path) -> None:
    """Catches Streamlit's way of going on as if there were no such file: all would be operators."""
    (tmp_path / ".streamlit").mkdir()
    (tmp_path / ".streamlit" / "secrets.toml").write_text(f'[auth]\ncookie_secret = "{SECRET}\n')
    shown = html(app())

    assert "is not readable TOML" in shown
    assert SECRET not in shown
    assert "No check has run yet" not in shown


@pytest.mark.parametrize(
    "text", ["schema_version = 2\n", ROLES + "[dashboard.grops]\n"], ids=["version", "key"]
)
def test_a_broken_configuration_gives_no_roles(empty_url: str, tmp_path: Path, text: str) -> None:
    """Catches roles of a file that nobody could read."""
    write_roles(tmp_path, text)
    shown = html(app(AUTH, email="bob@example.com"))

    assert "The sign-in is not configured correctly" in shown
    assert "quantwatch.toml" in shown


def test_a_sign_in_that_streamlit_refuses_is_a_sentence(empty_url: str, tmp_path: Path) -> None:
    """Catches an error box when a provider's section lacks a key."""
    write_roles(tmp_path)
    shown = app(AUTH | {"example": {"client_id": "a"}})
    shown.button[0].click().run()

    assert not shown.exception
    assert "The sign-in is not configured correctly" in html(shown)


def test_a_configuration_that_vanishes_gives_no_roles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_url: str
) -> None:
    """Catches an error box when an editor replaces the file just while it is looked for."""
    monkeypatch.setattr(access, "find_config", lambda *_: tmp_path / "gone.toml")
    shown = html(app(AUTH, email="bob@example.com"))

    assert "The sign-in is not configured correctly" in shown
    assert "gone.toml: cannot be read" in shown


@pytest.mark.parametrize(
    ("section", "names"),
    [
        (AUTH, ("example",)),
        (AUTH | PROVIDER, (None, "example")),
        (AUTH | {"client_kwargs": {"scope": "openid"}, "other": PROVIDER}, ("example", "other")),
    ],
    ids=["one", "one without a name beside it", "two and arguments"],
)
def test_each_provider_has_a_button(
    monkeypatch: pytest.MonkeyPatch, section: Any, names: tuple[str | None, ...]
) -> None:
    """Catches a button for what is no provider."""
    monkeypatch.setattr(access, "_auth_section", lambda: section)
    assert access.providers() == names


def test_without_a_request_nobody_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an operator where nothing is known of who asks."""
    monkeypatch.undo()
    assert access._visit().peer is None
