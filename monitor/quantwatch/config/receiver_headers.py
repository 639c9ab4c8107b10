"""Headers of one's own for a receiver: fixed names and values, secrets named and never shown."""

import re
from collections.abc import Mapping
from pathlib import Path

from quantwatch.config.secrets import Secret, from_environment, from_file
from quantwatch.config.service import EndpointConfig
from quantwatch.errors import ConfigError

Headers = tuple[tuple[str, Secret | str], ...]

MOST_HEADERS = 32
MOST_LETTERS = 4096
"""Of one value."""
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_OURS = frozenset(
    # What the message itself decides, …
    {"host", "content-length", "content-type", "content-encoding", "accept-encoding"}
    # … what is between two machines (RFC 9110, 7.6.1), and what would be a session.
    | {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect"}
    | {"cookie", "http2-settings"}
)
_OUR_STARTS = ("webhook-", "proxy-")
_SECRET = re.compile(r"auth|token|secret|passw|api-?_?key|signature|credential")


def resolve_headers(
    key: str, config: EndpointConfig, base_dir: Path, env: Mapping[str, str]
) -> Headers:
    """Return the headers of an endpoint in the order of their names, lower case.

    Raises ConfigError naming the header, never a value.
    """
    found: dict[str, Secret | str] = {}
    ways = {"headers": config.headers, "headers_env": config.headers_env}
    for table, headers in (ways | {"headers_file": config.headers_file}).items():
        for name, text in headers.items():
            at = f"{key}.{table}.{name}"
            _check_name(at, name, known=found)
            value = text if table == "headers" else _secret(at, table, text, base_dir, env)
            _check_value(at, name, value)
            found[name.lower()] = value
    if len(found) > MOST_HEADERS:
        raise ConfigError(f"{key}: {len(found)} headers; allowed: at most {MOST_HEADERS}")
    return tuple(sorted(found.items(), key=lambda pair: pair[0]))


def _secret(at: str, table: str, named: str, base_dir: Path, env: Mapping[str, str]) -> Secret:
    if table == "headers_env":
        return from_environment(at, named, env)
    return from_file(at, named, base_dir)


def _check_name(at: str, name: str, known: Mapping[str, object]) -> None:
    small = name.lower()
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{at}: is no name of a header; allowed: letters, digits, dashes, …")
    if small in _OURS or small.startswith(_OUR_STARTS):
        hint = "; use content_type" if small == "content-type" else ""
        raise ConfigError(f"{at}: quantwatch decides this header itself{hint}")
    if small in known:
        raise ConfigError(f"{at}: is named twice; letters' case makes no difference")


def _check_value(at: str, name: str, value: Secret | str) -> None:
    if isinstance(value, str) and _SECRET.search(name.lower()):
        raise ConfigError(f"{at}: holds a secret by its name; use headers_env or headers_file")
    text = value if isinstance(value, str) else value.reveal()
    if "{{" in text:
        raise ConfigError(f"{at}: has a placeholder; the value of a header is fixed")
    if len(text) > MOST_LETTERS or not _VALUE.fullmatch(text):
        raise ConfigError(
            f"{at}: the value is empty, longer than {MOST_LETTERS} letters, or has a line end, a "
            "control character, a blank at an end or a letter that isn't ASCII"
        )
