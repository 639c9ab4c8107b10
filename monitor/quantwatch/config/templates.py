"""Bodies of one's own: text with `{{ name }}`. Nothing in it is executed; there is no other syntax.

In a JSON body a placeholder inside a string becomes a piece of that string, one outside becomes a
whole value. Whether the result is valid JSON depends on the template alone, so it is known before
the first message: a whole value that parses as `null` and as a text stands where any value may.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quantwatch.config.template_variables import VARIABLES, WHOLE
from quantwatch.errors import ConfigError

MOST_BYTES = 20_000
"""Of a template; our own document is as large at most."""
MOST_PLACEHOLDERS = 100
Place = Literal["text", "string", "value"]
"""Plain text, inside a JSON string, or a JSON value of its own."""

_PLACEHOLDER = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_NAME = re.compile(r"[a-z0-9_]+(?:\.[a-z0-9_]+)*")
# "z" goes on no escape that a template began, quotes and line ends have to be escaped.
_SAMPLES: tuple[Any, ...] = (
    *(None, "", 'z "quoted" \\ \n\t\x00 é数 \u2028 \ud83d', -0.5, math.nan, math.inf, True),
    *([0.1, 0.2], {"key": "}} {{ title }}"}),
)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Where a variable is filled in."""

    name: str
    place: Place


@dataclass(frozen=True, slots=True)
class Template:
    """A body that was checked."""

    text: str
    content_type: str
    parts: tuple[str | Placeholder, ...]

    @property
    def names(self) -> frozenset[str]:
        """The variables that it shows."""
        return frozenset(part.name for part in self.parts if isinstance(part, Placeholder))

    def filled(self, values: Mapping[str, Any]) -> bytes:
        """Return the body for these variables; the same values give the same bytes.

        What is missing (None, or no finite number) becomes `null` as a value, and nothing in a
        text. Half a surrogate pair, as token pieces have, becomes `\\ud83d`: an escape in JSON,
        the same six letters in plain text.
        """
        written = (
            part if isinstance(part, str) else _WAYS[part.place](values[part.name])
            for part in self.parts
        )
        return "".join(written).encode("utf-8", "backslashreplace")


def parse(key: str, text: str, content_type: str) -> Template:
    """Return a template that gives a valid body for every message.

    Raises ConfigError naming the setting `key`, the place, and what is allowed.
    """
    if len(text.encode()) > MOST_BYTES or not text.strip():
        state = f"longer than {MOST_BYTES} bytes" if text.strip() else "empty"
        raise ConfigError(f"{key}: the template is {state}")
    is_json = not content_type.startswith("text/")
    # Without it a receiver may take plain text for Latin 1.
    if not is_json and "charset" not in content_type:
        content_type = f"{content_type}; charset=utf-8"
    template = Template(text, content_type, tuple(_parts(key, text, is_json=is_json)))
    named = [part.name for part in template.parts if isinstance(part, Placeholder)]
    _check_names(key, named)
    if is_json:
        for sample in _SAMPLES:
            _check_json(key, template, sample)
    return template


def _parts(key: str, text: str, *, is_json: bool) -> Iterator[str | Placeholder]:
    in_string, at = False, 0
    for found in _PLACEHOLDER.finditer(text):
        literal = text[at : found.start()]
        _check_literal(key, text, at, literal)
        in_string, is_open = _scanned(literal, in_string=in_string)
        if is_json and is_open:
            raise ConfigError(f"{key}: {_line(text, found.start())}: a placeholder after a \\")
        yield literal
        yield Placeholder(_name(key, text, found), _place(is_json=is_json, in_string=in_string))
        at = found.end()
    _check_literal(key, text, at, text[at:])
    yield text[at:]


def _place(*, is_json: bool, in_string: bool) -> Place:
    if not is_json:
        return "text"
    return "string" if in_string else "value"


def _scanned(literal: str, *, in_string: bool) -> tuple[bool, bool]:
    """Return whether a JSON text is inside a string after this piece, and inside an escape."""
    escaped = False
    for letter in literal:
        if escaped:
            escaped = False
        elif letter == '"':
            in_string = not in_string
        else:
            escaped = in_string and letter == "\\"
    return in_string, escaped


def _name(key: str, text: str, found: re.Match[str]) -> str:
    name = found[1].strip(" \t")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{key}: {_line(text, found.start())}: {_cut(found[0])} is no placeholder; allowed: "
            "{{ name }} with the name of a variable; there are no loops, conditions or filters"
        )
    return name


def _check_literal(key: str, text: str, at: int, literal: str) -> None:
    if (place := literal.find("{{")) >= 0:
        raise ConfigError(f"{key}: {_line(text, at + place)}: {{{{ without }}}}")


def _check_names(key: str, named: list[str]) -> None:
    if unknown := sorted(set(named) - VARIABLES.keys()):
        close = difflib.get_close_matches(unknown[0], VARIABLES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        words = ", ".join(map(repr, map(_cut, unknown)))
        raise ConfigError(f"{key}: unknown: {words}; {hint}known: {', '.join(VARIABLES)}")
    if twice := [name for name in WHOLE if named.count(name) > 1]:
        raise ConfigError(
            f"{key}: {twice[0]} is there {named.count(twice[0])} times; allowed: once"
        )
    if len(named) > MOST_PLACEHOLDERS:
        raise ConfigError(f"{key}: {len(named)} placeholders; allowed: at most {MOST_PLACEHOLDERS}")


def _check_json(key: str, template: Template, sample: Any) -> None:
    body = template.filled(dict.fromkeys(VARIABLES, sample)).decode()
    try:
        json.loads(body, parse_constant=_no_constant)
    except RecursionError:
        raise ConfigError(f"{key}: nested too deeply") from None
    except ValueError as error:
        why = str(error)
        if isinstance(error, json.JSONDecodeError):
            why = f"{error.msg} at {_cut(body[max(0, error.pos - 20) : error.pos + 20])!r}"
        raise ConfigError(
            f"{key}: no valid JSON once every variable is {_cut(_value(sample))}: {why}"
        ) from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _value(value: Any) -> str:
    """Return a value as JSON; a number that isn't finite is missing."""
    if isinstance(value, float) and not math.isfinite(value):
        return "null"
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True)


def _text(value: Any) -> str:
    """Return a text as it is, anything else as JSON writes it, nothing for what is missing."""
    if isinstance(value, str):
        return value
    written = _value(value)
    return "" if written == "null" else written


def _string(value: Any) -> str:
    """Return a text as it stands between the quotes of a JSON string."""
    return json.dumps(_text(value), ensure_ascii=False)[1:-1]


_WAYS: dict[Place, Callable[[Any], str]] = {"text": _text, "string": _string, "value": _value}


def _line(text: str, at: int) -> str:
    return f"line {text.count(chr(10), 0, at) + 1}"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"
