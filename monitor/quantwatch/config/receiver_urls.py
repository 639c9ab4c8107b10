"""A receiver's URL, parsed once; whatever two parsers could read differently is refused."""

import ipaddress
import re
from typing import TYPE_CHECKING

from quantwatch.errors import ConfigError

if TYPE_CHECKING:
    import httpx

DENIED_PORTS = frozenset(
    {21, 22, 23, 25, 53, 110, 143, 445, 465, 587, 993, 995, 2375, 2376, 3306, 3389, 5432, 6379}
    | {9200, 11211, 27017}
)
"""Ports of services that an HTTP request must not be smuggled into."""
_MOST_URL = 2048
_LOCAL = (".local", ".internal", ".localhost")
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NUMERIC = re.compile(r"0x[0-9a-f]*|[0-9]+")
_UNSAFE = re.compile(r"[\x00-\x20\x7f-\xa0\u2000-\u200f\u2028-\u202f\u3000\ufeff\\]")


def parse_url(
    key: str, text: str, *, allow_http: bool = False, allow_local: bool = False
) -> "httpx.URL":
    """Return a receiver's URL, parsed once by what also sends it.

    `allow_local` is for servers that the operator runs: localhost and names of a local network.

    Raises ConfigError on anything two parsers could read differently, or that no receiver has.
    """
    import httpx

    if wrong := _unreadable(text):
        raise ConfigError(f"{key}: the URL {wrong}")
    try:
        url = httpx.URL(text)
        host = url.raw_host.decode("ascii")
    except (ValueError, httpx.InvalidURL):
        # Their own words quote the URL, which may hold a token.
        raise ConfigError(f"{key}: the URL can't be read") from None
    wrong = _wrong_place(url, allow_http=allow_http) or _wrong_host(host, allow_local=allow_local)
    if wrong:
        raise ConfigError(f"{key}: the URL {wrong}")
    return url


def _unreadable(text: str) -> str | None:
    """Say what is wrong with the text of a URL before anybody parses it."""
    if len(text) > _MOST_URL:
        return f"is longer than {_MOST_URL} characters"
    if _UNSAFE.search(text):
        return "contains a blank, a control character or a backslash"
    return None


def _wrong_place(url: "httpx.URL", *, allow_http: bool) -> str | None:
    """Say what is wrong with the parts of a parsed URL."""
    if url.scheme not in ("https", "http"):
        return "is neither https nor http"
    if url.scheme == "http" and not allow_http:
        return "has no TLS; allow_http = true allows that"
    if url.userinfo or url.fragment:
        return f"contains a {'user or password before @' if url.userinfo else 'fragment (#)'}"
    return _wrong_port(url.port)


def _wrong_port(port: int | None) -> str | None:
    if port is None:
        return None
    if not 1 <= port <= 65535:
        return f"has port {port}; allowed: 1 to 65535"
    if port in DENIED_PORTS:
        return f"has port {port}, which belongs to another kind of service"
    return None


def _wrong_host(host: str, *, allow_local: bool = False) -> str | None:
    """Say what is wrong with a host: only names, canonical IPv4 and IPv6 without zone are left."""
    if ":" in host:
        return _wrong_ipv6(host)
    if len(host) > 253 or not _HOST.fullmatch(host):
        return "has no valid host"
    if _NUMERIC.fullmatch(host.rpartition(".")[2]):
        # 127.1, 0x7f.1 and 2130706433 are 127.0.0.1 to a resolver.
        return None if _is_dotted_quad(host) else "has a number for a host that is no dotted quad"
    if not allow_local and f".{host}".endswith(_LOCAL):
        return "has a host that ends in .local, .internal or .localhost"
    return None


def _wrong_ipv6(host: str) -> str | None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return "has no valid IPv6 address"
    return "has an IPv6 address with a zone" if "%" in host else None


def _is_dotted_quad(host: str) -> bool:
    try:
        return str(ipaddress.IPv4Address(host)) == host
    except ValueError:
        return False
