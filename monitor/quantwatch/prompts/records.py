"""Prompts as they are written, before any tokenizer has seen them, and the checks of their form."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantwatch.errors import PromptError

CONTENTS = ("text", "messages", "token_ids")
KEYS = (*CONTENTS, "id", "category")
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """One prompt as written: exactly one of text, messages and token_ids is given."""

    where: str
    """What error messages call it: file and line."""
    source: str
    category: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    windowed: bool = False
    """A whole file of plain text that is to be cut into windows."""
    shipped: bool = False


def parse_json(text: str, where: str, line: int = 1) -> Any:
    """Parse strict JSON: no NaN, no key twice. Raises PromptError with line and column."""
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        place = f"line {line + error.lineno - 1}, column {error.colno}"
        raise PromptError(f"{where}, {place}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise PromptError(f"{where}, line {line}: not usable JSON: nested too deeply") from None
    except ValueError as error:
        raise PromptError(f"{where}, line {line}: not usable JSON: {error}") from None


def parse_record(value: Any, where: str, origin: str, category: str) -> RawPrompt:
    """Turn one JSONL object into a prompt. Raises PromptError naming the key that is wrong.

    `origin` is the file or suite that the prompt's id is an id in.
    """
    if not isinstance(value, dict):
        raise PromptError(f"{where}: expected an object with one of {_listed(CONTENTS)}")
    unknown = sorted(value.keys() - set(KEYS))
    if unknown:
        raise PromptError(f"{where}: unknown key {unknown[0]!r}; allowed: {_listed(KEYS)}")
    given = [key for key in CONTENTS if key in value]
    if len(given) != 1:
        raise PromptError(f"{where}: exactly one of {_listed(CONTENTS)} is required")
    labels = {key: _label(value[key], key, where) for key in ("id", "category") if key in value}
    return RawPrompt(
        where,
        f"{origin}/{labels['id']}" if "id" in labels else where,
        labels.get("category", category),
        text=check_text(value["text"], where) if "text" in value else None,
        messages=_messages(value["messages"], where) if "messages" in value else None,
        token_ids=check_ids(value["token_ids"], where) if "token_ids" in value else None,
    )


def check_text(value: Any, where: str) -> str:
    """Return a text that can be tokenized. Raises PromptError when it is empty or no text."""
    if not isinstance(value, str):
        raise PromptError(f"{where}: expected a string, got {_kind(value)}")
    if not value.strip():
        raise PromptError(f"{where}: the prompt is empty or only white space")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        char = ascii(value[error.start])
        raise PromptError(
            f"{where}: character {error.start} is {char}, half of a surrogate pair and no text"
        ) from None
    return value


def check_ids(value: Any, where: str) -> tuple[int, ...]:
    """Return token ids. Raises PromptError when they are no list of non-negative integers."""
    if not isinstance(value, list | tuple):
        raise PromptError(f"{where}: token_ids must be a list of integers, got {_kind(value)}")
    for position, token_id in enumerate(value):
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            problem = f"token_ids[{position}] must be an integer, got {_kind(token_id)}"
            raise PromptError(f"{where}: {problem}")
    if not value:
        raise PromptError(f"{where}: token_ids is empty")
    return tuple(value)


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise PromptError(f"{where}: messages must be a list of at least one object")
    return tuple(_message(item, f"{where}, message {n}") for n, item in enumerate(value, 1))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise PromptError(f"{where}: expected an object, got {_kind(value)}")
    unknown = sorted(value.keys() - set(MESSAGE_KEYS))
    if unknown:
        raise PromptError(f"{where}: unknown key {unknown[0]!r}; allowed: {_listed(MESSAGE_KEYS)}")
    _label(value.get("role"), "role", where)
    if "tool_calls" not in value or value.get("content") is not None:
        check_text(value.get("content"), f"{where}, content")
    return value


def _label(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise PromptError(f"{where}: {key} must be a string that isn't empty, got {_kind(value)}")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is given twice")
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _kind(value: Any) -> str:
    """Name a JSON value's type as JSON calls it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {str: "a string", int: "an integer", float: "a number", list: "a list"}
    return names.get(type(value), "an object")


def _listed(words: tuple[str, ...]) -> str:
    return ", ".join(words)
