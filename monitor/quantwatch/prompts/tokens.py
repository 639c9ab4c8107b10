"""From a written prompt to token ids, by the tokenizer's own rules and with at most one BOS.

- text: `add_special_tokens=True`, so BOS is there exactly where the tokenizer wants it;
- chat: the text of the chat template, which carries its own special tokens;
- plain text files: tokenized whole with `add_special_tokens=False`, then cut into windows. A
  tokenizer that starts texts with BOS gets it at the start of every window, as part of its length:
  without it such models give nonsense (Gemma: a perplexity of 5.9e9 instead of 3.46);
- token ids are taken as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

from quantwatch.errors import PromptError
from quantwatch.prompts.records import Message, RawPrompt

WINDOW = 512
"""Tokens per window of plain text when nothing is said; llama.cpp's default too."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as token ids. `text` is None where only the tokens can tell it."""

    where: str
    source: str
    category: str
    token_ids: Sequence[int]
    text: str | None = None
    note: str | None = None
    """What was done to it that its reader should know."""


def encode(
    raw: RawPrompt, tokenizer: Any | None, *, window: int, score_start: int
) -> list[Encoded]:
    """Return one prompt, or the windows of a plain text file. Raises PromptError."""
    if raw.token_ids is not None:
        return [_from_ids(raw, tokenizer)]
    if tokenizer is None:
        problem = "the reference has no tokenizer; give token_ids (in a .jsonl file)"
        raise PromptError(f"{raw.where}: {problem}")
    if raw.windowed:
        return _windows(raw, tokenizer, window, score_start)
    if raw.messages is not None:
        return [_from_chat(raw, tokenizer)]
    assert raw.text is not None
    return [_from_text(raw, tokenizer, raw.text)]


def single_bos(ids: list[int], bos: int | None) -> list[int]:
    """Drop all but the last BOS of those that a prompt begins with."""
    return ids[max(_leading(ids, bos) - 1, 0) :]


def _leading(ids: Sequence[int], bos: int | None) -> int:
    return sum(1 for _ in takewhile(lambda token_id: token_id == bos, ids))


def text_ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Return the token ids of a text, with or without the tokenizer's special tokens around it."""
    # verbose=False: the length is checked here, against the model and not the tokenizer's file.
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return single_bos(ids, tokenizer.bos_token_id)


def _from_ids(raw: RawPrompt, tokenizer: Any | None) -> Encoded:
    assert raw.token_ids is not None
    bos = None if tokenizer is None else tokenizer.bos_token_id
    if _leading(raw.token_ids, bos) > 1:
        raise PromptError(f"{raw.where}: token_ids begin with BOS ({bos}) more than once; give one")
    return Encoded(raw.where, raw.source, raw.category, raw.token_ids)


def _from_text(raw: RawPrompt, tokenizer: Any, text: str, note: str | None = None) -> Encoded:
    ids = text_ids(tokenizer, text, special=True)
    return Encoded(raw.where, raw.source, raw.category, ids, text, note)


def _from_chat(raw: RawPrompt, tokenizer: Any) -> Encoded:
    assert raw.messages is not None
    if not getattr(tokenizer, "chat_template", None):
        if not raw.shipped:
            raise PromptError(f"{raw.where}: the tokenizer has no chat template; give text instead")
        plain = "\n".join(f"{message['role']}: {message['content']}" for message in raw.messages)
        note = 'rendered as lines of "role: content", as the tokenizer has no chat template'
        return _from_text(raw, tokenizer, plain, note)
    text = _render(raw.where, tokenizer, raw.messages)
    ids = text_ids(tokenizer, text, special=False)
    return Encoded(raw.where, raw.source, raw.category, ids, text)


def _render(where: str, tokenizer: Any, messages: Sequence[Message]) -> str:
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False))
    except (TemplateError, TypeError, ValueError) as error:
        raise PromptError(f"{where}: the chat template refuses the messages: {error}") from error


def _windows(raw: RawPrompt, tokenizer: Any, window: int, score_start: int) -> list[Encoded]:
    """Cut a text; a last window in which fewer than two positions are scored is left out."""
    assert raw.text is not None
    ids = text_ids(tokenizer, raw.text, special=False)
    cuts = _cut(raw.where, ids, tokenizer, window)
    note = None
    if len(cuts) > 1 and len(cuts[-1]) - score_start < 2:
        left = len(cuts.pop())
        note = f"its last window, {left} tokens, is left out: fewer than 2 would be scored"
    names = [f"{raw.source}, window {number} of {len(cuts)}" for number in range(1, len(cuts) + 1)]
    notes = [None] * (len(cuts) - 1) + [note]
    return [
        Encoded(name, name, raw.category, cut, note=said)
        for name, cut, said in zip(names, cuts, notes, strict=True)
    ]


def _cut(where: str, ids: list[int], tokenizer: Any, window: int) -> list[list[int]]:
    prefix = special_prefix(tokenizer)
    step = window - len(prefix)
    if step < 1 or not ids:
        problem = (
            f"{len(ids)} tokens, in windows of {window} with {len(prefix)} special tokens each"
        )
        raise PromptError(f"{where}: nothing to measure: {problem}")
    starts = range(0, len(ids), step)
    return [single_bos(prefix + ids[i : i + step], tokenizer.bos_token_id) for i in starts]


def special_prefix(tokenizer: Any) -> list[int]:
    """Return the special tokens that the tokenizer puts in front of every text."""
    plain, full = (text_ids(tokenizer, "a", special=special) for special in (False, True))
    starts = range(len(full) - len(plain) + 1)
    start = next((i for i in starts if full[i : i + len(plain)] == plain), 0)
    return full[:start]
