"""Multiple-choice items: JSONL with one `{question, A, B, C, D, answer}` a line.

``choices-v1`` comes with quantwatch: 200 items written for this project (Apache-2.0 like the rest
of it) in plain English, on common knowledge and the language itself, with 50 right answers on each
letter. Like a shipped suite it never changes. A file is read whole or refused: a wrong item would
be scored like any other and nobody would see it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from quantwatch.errors import PromptError
from quantwatch.prompts.files import read_text
from quantwatch.prompts.records import check_text, parse_json

LETTERS = ("A", "B", "C", "D")
KEYS = ("question", *LETTERS, "answer")
SHIPPED = "choices-v1"
MIN_ITEMS = 100
"""An accuracy near 70 % over fewer has a standard error above 4.6 points."""


@dataclass(frozen=True, slots=True)
class ChoiceItem:
    """A question, its four options in the order of the letters, and which of them is right."""

    where: str
    """What error messages call it: file and line."""
    question: str
    options: tuple[str, ...]
    answer: int

    @property
    def prompt(self) -> str:
        """What the options continue, without the space that separates them from it.

        A question that ends with a question mark is asked for an answer; anything else is the
        beginning of a sentence, which the option ends.
        """
        if self.question.endswith("?"):
            return f"Question: {self.question}\nAnswer:"
        return self.question


def read_choices(file: Path | None = None, *, at_least: int = MIN_ITEMS) -> list[ChoiceItem]:
    """Return the items of a file, of choices-v1 without one.

    Raises PromptError naming file, line, value and what is allowed: for a file that can't be read,
    a line that isn't such an object, a question that comes twice, options of an item that are the
    same, and fewer than `at_least` items.
    """
    if file is None:
        data = files("quantwatch.prompts").joinpath("data", f"{SHIPPED}.jsonl")
        name, text = SHIPPED, data.read_text(encoding="utf-8")
    else:
        name, text = file.name, read_text(str(file), Path())
    items: list[ChoiceItem] = []
    seen: dict[str, str] = {}
    # Not splitlines(): a JSON string may hold U+2028 and others that it takes for line ends.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        item = _item(parse_json(line, name, number), f"{name}, line {number}")
        if (first := seen.setdefault(_same(item.question), item.where)) != item.where:
            raise PromptError(f"{item.where}: question {item.question!r} was asked in {first}")
        items.append(item)
    if len(items) < at_least:
        raise PromptError(f"{name}: {len(items)} items; at least {at_least} are needed")
    return items


def _item(value: Any, where: str) -> ChoiceItem:
    if not isinstance(value, dict):
        raise PromptError(f"{where}: expected an object with the keys {', '.join(KEYS)}")
    _check_keys(value, where)
    texts = [_text(value[key], f"{where}, {key}") for key in KEYS[:-1]]
    options = tuple(texts[1:])
    for number, option in enumerate(options):
        first = [_same(other) for other in options].index(_same(option))
        if first != number:
            letters = f"{LETTERS[first]} and {LETTERS[number]}"
            raise PromptError(f"{where}: options {letters} are the same, {option!r}")
    answer = value["answer"]
    if answer not in LETTERS:
        raise PromptError(f"{where}: answer {answer!r}; allowed: {', '.join(LETTERS)}")
    return ChoiceItem(where, texts[0], options, LETTERS.index(answer))


def _check_keys(value: Mapping[str, Any], where: str) -> None:
    for kind, keys in (("unknown", value.keys() - set(KEYS)), ("no", set(KEYS) - value.keys())):
        if keys:
            raise PromptError(f"{where}: {kind} key {min(keys)!r}; allowed: {', '.join(KEYS)}")


def _text(value: Any, where: str) -> str:
    """Return a text; space around it is refused, since it would move tokens."""
    if isinstance(value, str) and not value.strip():
        raise PromptError(f"{where}: {value!r} is empty; allowed: any other text")
    text = check_text(value, where)
    if text != text.strip():
        raise PromptError(f"{where}: {text!r} begins or ends with white space")
    return text


def _same(text: str) -> str:
    return " ".join(text.casefold().split())
