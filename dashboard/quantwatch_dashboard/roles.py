"""Who may do what: pure decisions from a request and an identity, without Streamlit and clock."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from fnmatch import fnmatchcase
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from quantwatch.config.dashboard import DashboardConfig, GrantsConfig
from quantwatch.config.durations import seconds
from quantwatch.errors import UserError

FORWARDING = (
    *("forwarded", "via", "x-real-ip", "x-client-ip", "x-cluster-client-ip", "true-client-ip"),
    *("client-ip", "cf-connecting-ip", "cf-ray", "fastly-client-ip", "x-original-host"),
)
"""Headers that proxies add; beside them whatever begins with one of these:"""
_FORWARDING_PREFIXES = ("x-forwarded", "x-envoy-", "tailscale-", "x-original-forwarded")


class Role(IntEnum):
    """What somebody may do; each may do what the ones before may."""

    NONE = 0
    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        """The role in a sentence."""
        return "nobody" if self is Role.NONE else self.name.lower()


class How(StrEnum):
    """How somebody came to a role."""

    LOCAL = "local"
    """On this machine, where no sign-in is configured."""
    OPEN = "open"
    """From elsewhere, where no sign-in is configured."""
    SIGNED_OUT = "signed out"
    EXPIRED = "expired"
    SIGNED_IN = "signed in"
    BROKEN = "broken"
    """The sign-in, or the file with the roles, is not configured correctly."""


class AccessError(UserError):
    """Somebody's role is too low for what was asked for."""


@dataclass(frozen=True, slots=True)
class Person:
    """Who looks at a page. `words` is a sentence about the role for the person."""

    name: str
    """Stands in the audit log."""
    role: Role
    how: How
    words: str = ""

    def may(self, needed: Role) -> bool:
        """Say whether the role is high enough."""
        return self.role >= needed

    def require(self, needed: Role, what: str) -> None:
        """Raise AccessError unless the role is high enough for what is asked for."""
        if not self.may(needed):
            own = "no role" if self.role is Role.NONE else f"role {self.role.word}"
            raise AccessError(f"{what} needs the role {needed.word}; {self.name} has {own}.")


@dataclass(frozen=True, slots=True)
class Visit:
    """A request as it reached the server. Names of headers are in lower case."""

    listens: str | None
    """Address that the server listens on; None: on all."""
    peer: str | None
    headers: Mapping[str, str]


def local_person(visit: Visit, name: str) -> Person:
    """Return who somebody is where no sign-in is configured."""
    reason = why_not_local(visit)
    if reason is None:
        words = "this page is served on this machine only, and no sign-in is configured"
        return Person(name, Role.OPERATOR, How.LOCAL, f"You are operator: {words}.")
    words = f"You can look but not act: no sign-in is configured, and {reason}."
    return Person("anonymous", Role.VIEWER, How.OPEN, words)


def why_not_local(visit: Visit) -> str | None:
    """Return why a request may come from another machine, None when it can't.

    A reverse proxy on this machine makes all the world look local, and so does a page elsewhere
    whose name resolves to 127.0.0.1 (DNS rebinding): both show in the headers.
    """
    if not _is_own_name(visit.listens or ""):
        return f"the server listens on {visit.listens or 'all addresses'}, not only on localhost"
    if visit.peer is None or not _is_own_name(visit.peer):
        return f"the request came from {visit.peer or 'an unknown address'}"
    if forwarded := next(filter(_is_forwarding, visit.headers), None):
        return f"the request came through a proxy (header {forwarded})"
    return _why_another_page(visit)


def _why_another_page(visit: Visit) -> str | None:
    host = visit.headers.get("host", "")
    if not _is_own_name(_host_name(f"//{host}")):
        return f"the page was asked for under the name {host or '(none)'}, not localhost"
    origin = visit.headers.get("origin")
    if origin is None:
        # Browsers always name it; behind a forwarder that adds no header, whatever else may not.
        return "the request does not say which page it comes from (no header Origin)"
    if _netloc(origin) != host.lower():
        return f"the request came from a page of {origin}"
    return None


def signed_in(claims: Mapping[str, Any] | None, settings: DashboardConfig, now: float) -> Person:
    """Return who somebody is where sign-in is configured; `claims` is None without an identity."""
    anonymous = Role.VIEWER if settings.anonymous == "viewer" else Role.NONE
    if claims is None:
        return Person("anonymous", anonymous, How.SIGNED_OUT, "You are not signed in.")
    name = _name(claims, settings)
    if now >= ends_at(claims, settings):
        return Person("anonymous", anonymous, How.EXPIRED, f"The sign-in of {name} has expired.")
    role = role_of(claims, settings)
    words = f"You are signed in as {name} with the role {role.word}."
    if role is Role.NONE:
        words = f"You are signed in as {name}, to whom no role was given."
    return Person(name, role, How.SIGNED_IN, words)


def role_of(claims: Mapping[str, Any], settings: DashboardConfig) -> Role:
    """Return the highest role that the verified address or a group is given."""
    email = verified_email(claims, settings)
    found = list(_granted(settings.roles, email, fold=True)) if email is not None else []
    for group in groups(claims, settings.groups_claim):
        found += _granted(settings.groups, group, fold=False)
    return max(found, default=Role.NONE)


def verified_email(claims: Mapping[str, Any], settings: DashboardConfig) -> str | None:
    """Return the address in lower case, None unless the provider vouches for it.

    Some providers write the mark as text. One that says nothing is believed only if settings do.
    """
    email, mark = claims.get("email"), claims.get("email_verified")
    trusted = mark is True or mark == "true" or (mark is None and settings.trust_unmarked_email)
    if not trusted or not isinstance(email, str):
        return None
    local, at, domain = email.partition("@")
    if not (local and at and domain) or "@" in domain or not email.isprintable() or " " in email:
        return None
    return _folded(email)


def groups(claims: Mapping[str, Any], claim: str | None) -> tuple[str, ...]:
    """Return the groups in a claim: one text, or a list. A name with dots may be a path."""
    if claim is None:
        return ()
    found: Any = claims
    for key in (claim,) if claim in claims else claim.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    if isinstance(found, str):
        return (found,)
    listed = found if isinstance(found, list | tuple) else ()
    return tuple(group for group in listed if isinstance(group, str))


def ends_at(claims: Mapping[str, Any], settings: DashboardConfig) -> float:
    """Return when an identity ends, in seconds since 1970; 0 when its token doesn't say."""
    if settings.session is None:
        return _instant(claims.get("exp"))
    issued = _instant(claims.get("iat"))
    return issued + seconds(settings.session) if issued else 0.0


def _instant(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _granted(grants: GrantsConfig, name: str, *, fold: bool) -> Iterator[Role]:
    for role in (Role.ADMIN, Role.OPERATOR, Role.VIEWER):
        globs: tuple[str, ...] = getattr(grants, role.word)
        if any(fnmatchcase(name, _folded(glob) if fold else glob) for glob in globs):
            yield role


def _folded(text: str) -> str:
    """Lower ASCII letters only: the Kelvin sign, say, must not become somebody else's k."""
    return "".join(char.lower() if char.isascii() else char for char in text)


def _name(claims: Mapping[str, Any], settings: DashboardConfig) -> str:
    """Return what stands in the audit log: nothing that a person could have chosen for themself."""
    if (email := verified_email(claims, settings)) is not None:
        return email
    issuer = urlsplit(str(claims.get("iss") or "")).hostname or "unknown provider"
    return f"{claims.get('sub') or 'unknown'} of {issuer}"


def _is_forwarding(header: str) -> bool:
    return header in FORWARDING or header.startswith(_FORWARDING_PREFIXES)


def _host_name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _netloc(url: str) -> str:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


def _is_own_name(name: str) -> bool:
    """Say whether a name or address is one of a machine for itself."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
