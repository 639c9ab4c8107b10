"""OpenAI's older completions protocol: `echo` with `logprobs`, as several servers speak it.

It tells texts, not ids: `tokens`, `token_logprobs` and `top_logprobs`, one entry per token, the
generated one last. A text that stands for exactly one id of the reference's vocabulary is that id
(vLLM's `token_id:123` says so itself); any other one is unknown, and its probability belongs to the
rest. The target's own log-probability is told by position and needs no text.

`top_logprobs` is an object, so of several ids with one text (bytes of split characters, special
tokens) one is told and the others are hidden, the likelier ones as well. Fewer entries than were
asked for, beside a text that is unknown, are taken for that.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quantwatch.models.served.answers import (
    UNKNOWN,
    Answer,
    Position,
    Question,
    log_probability,
    position,
    require_one_row,
)
from quantwatch.models.served.dialect import (
    PLAIN_OPENAI,
    Said,
    ask_once,
    choose_model,
    count,
    first_choice,
    plain_facts,
    same_count,
    stamp_of,
    table,
    token_id,
)
from quantwatch.models.served.freshness import Freshness
from quantwatch.models.served.http import JsonClient
from quantwatch.models.served.trouble import GarbledAnswerError, UnusableServerError

_SPACES = str.maketrans({"Ġ": " ", "▁": " "})
_BY_ID = "token_id:"
_UNREADABLE = ("\ufffd", "<0x", "bytes:")


class Openai:
    """Speaks the older completions protocol of OpenAI."""

    always_tells_target = True

    def __init__(self) -> None:
        self._known: tuple[Sequence[str], Mapping[str, int]] | None = None

    def identify(self, client: JsonClient, wanted: str | None) -> Said:
        """Return the model's name and owner."""
        record = choose_model(client, wanted)
        context = count(record.get("max_model_len"))
        return Said(str(record["id"]), plain_facts(record, "id", "owned_by"), context=context)

    def ask(self, client: JsonClient, question: Question, freshness: Freshness) -> Answer:
        """Return a prompt's positions from one request."""
        if self._known is None or self._known[0] is not question.texts:
            self._known = question.texts, ids_by_text(question.texts)
        by_text = self._known[1]
        body = {
            "model": question.model,
            "prompt": list(question.ids),
            "echo": True,
            "logprobs": question.top_k,
            "max_tokens": 1,
            **PLAIN_OPENAI,
        }

        def read(document: Any) -> Answer:
            return Answer(_read(document, question, by_text), stamp_of(document))

        return ask_once(client, "/v1/completions", lambda: body, read, freshness)


def ids_by_text(texts: Sequence[str]) -> Mapping[str, int]:
    """Return text → id, `UNKNOWN` for a text that several ids have."""
    found: dict[str, int] = {}
    for token, text in enumerate(texts):
        found[text] = UNKNOWN if text in found else token
    return found


def _read(
    document: Any, question: Question, by_text: Mapping[str, int]
) -> tuple[Position | str, ...]:
    choice = first_choice(document)
    said = table(choice.get("logprobs"))
    tokens, targets, tops = (
        said.get(name) for name in ("tokens", "token_logprobs", "top_logprobs")
    )
    if not (isinstance(tokens, list) and isinstance(targets, list) and isinstance(tops, list)):
        raise GarbledAnswerError("the answer has no tokens, token_logprobs and top_logprobs")
    if len({len(tokens), len(targets), len(tops)}) != 1:
        raise GarbledAnswerError("tokens, token_logprobs and top_logprobs have different lengths")
    if len(tokens) != len(question.ids):
        same_count(len(tokens) - 1, len(question.ids))  # the generated one is the last
    _same_texts(tokens, question)
    _same_ids(tokens, question, by_text)
    every = range(1, len(question.ids))
    found = [_position(targets[at], tops[at], question, by_text) for at in every]
    require_one_row(found, question.ids)
    found = found[question.first :]
    _require_ids(found)
    return tuple(found)


def _position(
    target: Any, top: Any, question: Question, by_text: Mapping[str, int]
) -> Position | str:
    if target is None or top is None:
        return "null"
    if not isinstance(top, dict):
        return "no table of log-probabilities"
    # The token that came is told as well where it is beyond the k.
    entries = [(_id(text, by_text), value) for text, value in top.items()]
    known = log_probability(target)
    hidden = _hidden(entries, question.top_k, known)
    return position(entries, question.top_k, known, hidden=hidden, most_ids=question.most_ids)


def _hidden(entries: list[tuple[int, Any]], top_k: int, target: float | str) -> int:
    """Return how many of the k likeliest may have fallen together with others of their text."""
    values = [log_probability(value) for _, value in entries]
    numbers = [value for value in values if not isinstance(value, str)]
    if isinstance(target, str) or len(numbers) < len(values):
        return 0  # it is missing anyway
    if all(token != UNKNOWN for token, _ in entries):
        return 0
    # Behind all that is told, the target may be one more than the k.
    is_last = target <= min(numbers)
    return max(0, top_k + is_last - len(entries))


def _id(text: str, by_text: Mapping[str, int]) -> int:
    if not text:  # what special tokens decode to
        return UNKNOWN
    digits = text.removeprefix(_BY_ID)
    if digits != text and (told := token_id(digits)) is not None:
        return told
    return by_text.get(text, by_text.get(text.translate(_SPACES), UNKNOWN))


def _same_texts(tokens: list[Any], question: Question) -> None:
    """Raise UnusableServerError where a token's text is surely another one's."""
    for at, (text, token) in enumerate(zip(tokens, question.ids, strict=False)):
        ours = question.texts[token] if token < len(question.texts) else ""
        theirs = str(text).translate(_SPACES)
        if theirs.startswith(_BY_ID):
            ours = f"{_BY_ID}{token}"
        unclear = any(sign in one for sign in _UNREADABLE for one in (ours, theirs))
        if ours and theirs and not unclear and ours.strip() != theirs.strip():
            raise UnusableServerError(
                f"the server scored other tokens than it was sent: at position {at} it has "
                f"{theirs[:40]!r}, not {ours[:40]!r} (another tokenizer, or a BOS put in front?)"
            )


def _same_ids(tokens: list[Any], question: Question, by_text: Mapping[str, int]) -> None:
    """Raise UnusableServerError where a text stands for another id here than there.

    The first token of a text may be written without its space, wherever texts are joined.
    """
    for at, (text, token) in enumerate(zip(tokens, question.ids, strict=False)):
        ours = _id(str(text), by_text)
        if at and ours not in (UNKNOWN, token):
            raise UnusableServerError(
                f"the server's texts stand for other ids: at position {at} it writes "
                f"{str(text)[:40]!r} for id {token}, which is id {ours} here: use an api that "
                "tells ids"
            )


def _require_ids(found: list[Position | str]) -> None:
    read = [one for one in found if isinstance(one, Position)]
    if read and all(set(one.ids) == {UNKNOWN} for one in read):
        raise UnusableServerError(
            "none of the texts that the server tells stands for one id of the reference's "
            "tokenizer: use an api that tells ids"
        )
