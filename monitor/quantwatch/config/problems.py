"""Say what is wrong with a configuration: dotted key, value, what is allowed."""

import json
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from quantwatch.config.base import NAME_PATTERN
from quantwatch.errors import ConfigError

_MOST_SHOWN = 10
_MOST_LETTERS = 60
_SECRET = {"url"}
"""Keys whose value may hold a password and is never shown."""
_SECRETS = {"headers"}
"""Tables of such values."""
_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "tuple_type": "a list in brackets",
    "list_type": "a list in brackets",
    "model_type": "a table",
    "dict_type": "a table",
}
_LIMITS = {
    "greater_than": ("gt", "more than {}"),
    "greater_than_equal": ("ge", "{} or more"),
    "less_than": ("lt", "less than {}"),
    "less_than_equal": ("le", "at most {}"),
    "too_short": ("min_length", "at least {} of them"),
    "too_long": ("max_length", "at most {} of them"),
    "string_too_short": ("min_length", "at least {} characters"),
}
Location = tuple[int | str, ...]


def config_error(origin: str, problems: Sequence[str]) -> ConfigError:
    """Return one error that lists up to ten problems of a file (or of a command line)."""
    if len(problems) == 1:
        return ConfigError(f"{origin}: {problems[0]}")
    shown = [f"  {problem}" for problem in problems[:_MOST_SHOWN]]
    hidden = len(problems) - len(shown)
    more = [f"  … and {hidden} more"] if hidden else []
    return ConfigError("\n".join([f"{origin}: {len(problems)} errors", *shown, *more]))


def sentences(error: ValidationError, model: type[BaseModel] | None = None) -> list[str]:
    """Return one sentence per error; with the model, unknown keys get a suggestion."""
    found = [dict(one) for one in error.errors(include_url=False)]
    return [_sentence(one, model) for one in found if not _consequence(one)]


def dotted(location: Sequence[int | str]) -> str:
    """Return a location as TOML writes it: checks.nightly.candidates[1].recipe.group_size."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not (part.startswith("<") or part == "[key]"):
            bare = part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else json.dumps(part)
            text += f".{bare}" if text else bare
    return text


def _sentence(error: dict[str, Any], model: type[BaseModel] | None) -> str:
    location: Location = error["loc"]
    key = dotted(location)
    said = _complaint(error, location, model)
    return f"{key}: {said}" if key else said


def _consequence(error: dict[str, Any]) -> bool:
    """A list whose entries are all wrong is reported as empty too: only the entries matter."""
    return error["type"] == "too_short" and len(error["input"]) > 0


def _complaint(error: dict[str, Any], location: Location, model: type[BaseModel] | None) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(location, model)
    if kind == "missing":
        return _missing(location)
    if kind == "value_error":
        return str(context["error"])
    value = _shown(location, error["input"])
    allowed = _allowed(kind, context)
    return f"{value}allowed: {allowed}" if allowed else f"{value}{error['msg']}"


def _allowed(kind: str, context: dict[str, Any]) -> str | None:
    if kind in ("literal_error", "enum"):
        return str(context["expected"]).replace("'", '"')
    if kind == "string_pattern_mismatch":
        return _pattern(context["pattern"])
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return words.format(context[name])
    return _KINDS.get(kind)


def _pattern(pattern: str) -> str:
    if pattern == NAME_PATTERN:
        return "1 to 64 letters, digits, dots, dashes and underscores, a letter or digit first"
    return f"text that matches {pattern}"


def _shown(location: Location, value: Any) -> str:
    """Return the value as a prefix of a complaint; tables and secrets are left out."""
    hidden = bool(_SECRET.intersection(location[-1:]) or _SECRETS.intersection(location[-2:-1]))
    if isinstance(value, dict | list | BaseModel) or hidden:
        return ""
    text = json.dumps(value, ensure_ascii=False, default=str)
    cut = text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"
    return f"{cut} is not allowed; "


def _missing(location: Location) -> str:
    if location == ("schema_version",):
        return "required, but missing; write schema_version = 1"
    return "required, but missing"


def _unknown_key(location: Location, model: type[BaseModel] | None) -> str:
    known = sorted(model_at(model, location[:-1]).model_fields) if model else []
    close = get_close_matches(str(location[-1]), known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown key{hint or '; allowed: ' + ', '.join(known)}"


def model_at(model: type[BaseModel], location: Location) -> type[BaseModel]:
    """Return the section that a location lies in; keys of dictionaries and indices are skipped."""
    for part in location:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        if field is not None:
            model = next(_models_in(field.annotation), model)
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
