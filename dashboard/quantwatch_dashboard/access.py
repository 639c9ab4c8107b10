"""Who looks at the page, and what they may do. The decisions are in `roles`; this asks Streamlit.

Streamlit knows *who* somebody is (OIDC, `st.login`), never what they may do: that is our part.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import streamlit as st
from streamlit import config as options

from quantwatch.cli.actor import who
from quantwatch.config.dashboard import DashboardConfig
from quantwatch.config.load import find_config, load_config
from quantwatch.errors import ConfigError
from quantwatch_dashboard import roles
from quantwatch_dashboard.roles import AccessError, How, Person, Role

__all__ = ["AccessError", "How", "Person", "Role", "current", "for_readers", "providers"]

T = TypeVar("T")

_FRESH_S = 5
_SHORTEST_SECRET = 32


def current() -> Person:
    """Return who looks at the page now; asked anew on every run, so that a sign-in can end."""
    return _person(_visit(), _claims())


def for_readers(made: Callable[[], T]) -> Callable[[], T]:
    """Return what makes a download only while whoever was shown the button may read.

    A file is made after its page, where Streamlit no longer says who asks: the identity is the
    page's, its end and its role are those of the moment. Raises AccessError then.
    """
    visit, claims = _visit(), _claims()

    def make() -> T:
        _person(visit, claims).require(Role.VIEWER, "Downloading")
        return made()

    return make


def _person(visit: roles.Visit, claims: Mapping[str, Any] | None) -> Person:
    try:
        section = _auth_section()
        if section is None:
            return roles.local_person(visit, who())
        _require_usable(section)
        return roles.signed_in(claims, _settings(), time.time())
    except ConfigError as error:
        return Person("anonymous", Role.NONE, How.BROKEN, str(error))


def providers() -> tuple[str | None, ...]:
    """Return the names of the configured providers; None is the one without a name."""
    section = _auth_section() or {}
    tables = (key for key, value in section.items() if isinstance(value, Mapping))
    named = tuple(key for key in tables if key != "client_kwargs")
    return (None, *named) if "client_id" in section else named


def _auth_section() -> Mapping[str, Any] | None:
    """Return Streamlit's `[auth]`, None where there is none.

    Raises ConfigError when a file that may have one can't be read: Streamlit goes on as if there
    were none, and that would make operators of everybody here.
    """
    try:
        found = st.secrets.to_dict().get("auth")
    except Exception as error:
        known = [path for path in options.get_option("secrets.files") if Path(path).exists()]
        if not known:
            return None
        # The parser's own words may quote a secret.
        raise ConfigError(f"{' or '.join(known)} is not readable TOML") from error
    if found is not None and not isinstance(found, Mapping):
        raise ConfigError("secrets.toml: auth is no section; write [auth]")
    return found


def _require_usable(section: Mapping[str, Any]) -> None:
    """Raise ConfigError on settings with which a sign-in fails, or could be forged."""
    if missing := [key for key in ("redirect_uri", "cookie_secret") if not section.get(key)]:
        raise ConfigError(f"secrets.toml: [auth] has no {' and no '.join(missing)}")
    if len(str(section["cookie_secret"])) < _SHORTEST_SECRET:
        raise ConfigError(
            f"secrets.toml: cookie_secret is shorter than {_SHORTEST_SECRET} characters; whoever "
            'guesses it is anybody. Make one: python -c "import secrets; '
            'print(secrets.token_hex(32))"'
        )
    if not providers():
        raise ConfigError("secrets.toml: [auth] names no provider (client_id, …)")


def _claims() -> Mapping[str, Any] | None:
    claims: dict[str, Any] = dict(st.user.to_dict())
    return claims if claims.get("is_logged_in") is True else None


def _visit() -> roles.Visit:
    headers = {name.lower(): value for name, value in st.context.headers.items()}
    # Streamlit writes None for 127.0.0.1 and ::1; without headers there is no request at all.
    peer = st.context.ip_address or ("127.0.0.1" if headers else None)
    return roles.Visit(options.get_option("server.address"), peer, headers)


def _settings() -> DashboardConfig:
    path = find_config(Path.cwd(), os.environ)
    if path is None:
        return DashboardConfig()
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return _read(str(path), changed)


@st.cache_resource(ttl=_FRESH_S, max_entries=2, show_spinner=False)
def _read(path: str, changed: int) -> DashboardConfig:  # noqa: ARG001
    """Read the section. `changed` makes the cache forget a file that was edited."""
    return load_config(Path(path)).dashboard
