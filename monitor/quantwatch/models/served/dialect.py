"""What every protocol's adapter does: ask who the server is, and ask about a prompt."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quantwatch.models.served.answers import Answer, Question, Stamp
from quantwatch.models.served.freshness import Freshness
from quantwatch.models.served.http import JsonClient
from quantwatch.models.served.trouble import UnusableServerError, readable

_MOST_DIGITS = 12
_MOST_TEXT = 1000
PLAIN_OPENAI: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
PLAIN: Mapping[str, float] = {**PLAIN_OPENAI, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""No sampler at all: what a request leaves out, servers take from the model's own
`generation_config.json`, and some of their versions apply it to log-probabilities as well.
"""


@dataclass(frozen=True, slots=True)
class Said:
    """What a server says of itself. None where it says nothing; weights are never known."""

    model: str
    """The name that it is asked by."""
    facts: Mapping[str, str | int | float | bool]
    """Version, model, dtype, …: what makes it another one when it changes. No secrets, no times."""
    context: int | None = None
    """Most tokens of a prompt and what follows it."""
    num_tokens: int | None = None
    """Size of its vocabulary."""
    num_bytes: int | None = None
    """Size of its weights."""
    num_weights: int | None = None


class Dialect(Protocol):
    """One protocol."""

    always_tells_target: bool
    """Whether the target's log-probability is told however unlikely it is."""

    def identify(self, client: JsonClient, wanted: str | None) -> Said:
        """Return what the server says of itself. Raises UnusableServerError, NoAnswerError."""

    def ask(self, client: JsonClient, question: Question, freshness: Freshness) -> Answer:
        """Return the log-probabilities of a prompt. Raises UnusableServerError, NoAnswerError."""


def choose_model(client: JsonClient, wanted: str | None) -> dict[str, Any]:
    """Return the server's record of the model that is wanted, or of the only one it has."""
    listed = table(client.get("/v1/models")).get("data")
    records = [table(one) for one in listed] if isinstance(listed, list) else []
    names = [str(record["id"]) for record in records if record.get("id")]
    if not names:
        raise UnusableServerError(f"{client.base.host} lists no models at /v1/models")
    if wanted is None and len(names) > 1:
        raise UnusableServerError(
            f"{client.base.host} has several models: set model to one of {_few(names)}"
        )
    if wanted is not None and wanted not in names:
        raise UnusableServerError(
            f"{client.base.host} has no model {wanted!r}; it has {_few(names)}"
        )
    chosen = wanted or names[0]
    if readable(chosen, _MOST_TEXT) != chosen:
        raise UnusableServerError(
            f"{client.base.host} calls its model {chosen[:80]!a}: a name is at most {_MOST_TEXT} "
            "characters that can be shown"
        )
    return next(r for r in records if str(r.get("id")) == chosen)


def plain_facts(record: Mapping[str, Any], *names: str) -> dict[str, str | int | float | bool]:
    """Return the named facts of a record that are plain values."""
    found: dict[str, str | int | float | bool] = {}
    for name in names:
        value = record.get(name)
        text = readable(value, _MOST_TEXT) if isinstance(value, str) else None
        plain = value if isinstance(value, bool) else number(value) if text is None else text
        if plain is not None:
            found[name] = plain
    return found


def table(value: Any) -> dict[str, Any]:
    """Return a JSON object, an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def count(value: Any) -> int | None:
    """Return a positive whole number, None for anything else."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if whole else None


def number(value: Any) -> float | None:
    """Return a finite number, None for anything else."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return value if plain and math.isfinite(value) else None


def token_id(digits: str) -> int | None:
    """Return the id that digits say, None where they are none or far too many."""
    plain = digits.isascii() and digits.isdigit() and len(digits) < _MOST_DIGITS
    return int(digits) if plain else None


def text(value: Any) -> str | None:
    """Return a text that says something, None for anything else."""
    return value if isinstance(value, str) and value else None


def ask_once(
    client: JsonClient,
    path: str,
    body: Callable[[], Any],
    read: Callable[[Any], Answer],
    freshness: Freshness,
) -> Answer:
    """Return what is read of one request's answer, once that is known to be a fresh one."""

    def checked(document: Any) -> Answer:
        answer = read(document)
        freshness.check(answer.stamp)
        return answer

    answer: Answer = client.post(path, body, checked)
    return answer


def stamp_of(document: Any) -> Stamp:
    """Return who made an answer in OpenAI's form, and when."""
    record = table(document)
    return Stamp(
        model=text(record.get("model")),
        fingerprint=text(record.get("system_fingerprint")),
        created=number(record.get("created")),
        request=text(record.get("id")),
    )


def first_choice(document: Any) -> dict[str, Any]:
    """Return the first of an answer's choices."""
    choices = table(document).get("choices")
    return table(choices[0]) if isinstance(choices, list) and choices else {}


def same_tokens(said: Any, sent: tuple[int, ...]) -> None:
    """Raise UnusableServerError unless the ids that a server scored are those that were sent."""
    if not isinstance(said, list):
        return
    pairs = enumerate(zip(said, sent, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(said), len(sent)))
    if at < max(len(said), len(sent)):
        ours = repr(sent[at]) if at < len(sent) else "nothing"
        theirs = repr(said[at]) if at < len(said) else "nothing"
        raise UnusableServerError(
            f"the server scored other tokens than it was sent: at position {at} it has {theirs}, "
            f"not {ours} (another tokenizer, or a BOS put in front?)"
        )


def same_count(said: int, sent: int) -> None:
    """Raise UnusableServerError unless a server scored as many tokens as it was sent."""
    if said != sent:
        raise UnusableServerError(
            f"the server scored {said} tokens where it was sent {sent}: it adds or drops some "
            "(a BOS put in front?)"
        )


def _few(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name[:80]) for name in names[:most]) + more
