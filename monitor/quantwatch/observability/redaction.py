"""What must never be read: secrets are taken out where a text is made, not where it is shown.

One registry per process, because a secret has to be kept out of every text of the process: logs,
error columns, messages to others.
"""

import json
import re
import threading
from base64 import b64encode
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

HIDDEN = "[redacted]"
SHORTEST = 4
"""Letters; a shorter secret can't be told from ordinary words and is not kept out."""
_SCHEMES = {"basic", "bearer", "digest", "token"}
"""How a secret header begins: ordinary words."""
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/?#'\"@]*@"), rf"\1{HIDDEN}@"),
    # Tokens of chat services stand in the path: of a web address only the host is told.
    (re.compile(r"(?i)\b(https?://[^\s/?#'\"<>]+)([/?#])[^\s'\"<>)\]]+"), rf"\1\2{HIDDEN}"),
    (re.compile(r"\bwhsec_[A-Za-z0-9+/=_-]+"), HIDDEN),
    (
        re.compile(
            r"(?i)(\b(?:proxy-)?authorization\b['\"]?\s*[:=]\s*['\"]?)"
            r"(?:(?:bearer|basic|token|digest)\s+)?[^\s'\",}]+"
        ),
        rf"\1{HIDDEN}",
    ),
    # A word of a sentence is no token: one has a digit or a sign in it.
    (
        re.compile(r"(?i)\b(bearer|basic)\s+(?=\S*[0-9_~+/=])[A-Za-z0-9._~+/=-]{8,}"),
        rf"\1 {HIDDEN}",
    ),
    (
        re.compile(
            r"(?i)(\b(?:password|passwd|pwd|api[_-]?key|access[_-]?token|routing_key)\b['\"]?"
            r"\s*[:=]\s*['\"]?)[^\s'\",;&}]+"
        ),
        rf"\1{HIDDEN}",
    ),
)
_lock = threading.Lock()
_secrets: set[str] = set()


def register(secret: str) -> None:
    """Keep a value out of every text from now on, also percent-encoded and in base 64."""
    for part in {secret.strip(), *secret.split()}:
        if len(part) >= SHORTEST and part.lower() not in _SCHEMES:
            with _lock:
                _secrets.update(_forms(part))


def forget() -> None:
    """Empty the registry: for tests and at the end of a service."""
    with _lock:
        _secrets.clear()


def scrub(text: str) -> str:
    """Return a text without secrets: registered values, and whatever looks like one."""
    with _lock:
        longest_first = sorted(_secrets, key=len, reverse=True)
    for secret in longest_first:
        text = text.replace(secret, HIDDEN)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def scrubbed(value: Any) -> Any:
    """Return plain data (text, numbers, lists, mappings) without secrets; others become text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {scrub(str(key)): scrubbed(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [scrubbed(item) for item in value]
    return scrub(str(value))


def _forms(secret: str) -> set[str]:
    """Return how a secret may be written: as it is, in a URL, in JSON, in an authorization."""
    # Python shows text with escapes in `repr`, which is how it gets into exceptions.
    escaped = secret.encode("unicode_escape").decode()
    in_json = json.dumps(secret)[1:-1]
    encoded = b64encode(secret.encode("utf-8", "surrogateescape")).decode()
    return {secret, quote(secret, safe=""), quote(secret), escaped, in_json, encoded}
