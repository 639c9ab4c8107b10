"""vLLM: `/v1/completions` with `prompt_logprobs`.

The answer's `prompt_logprobs` has one entry per prompt token: null for the first, then a table from
token id to {logprob, rank, decoded_token}, with the k likeliest ids and the token that really came.
It is asked with a random `cache_salt`, so that no position is read from its prefix cache, and for
`prompt_token_ids`, so that it can be seen which tokens it scored.
"""

import secrets
from functools import partial
from typing import Any

from quantwatch.models.served.answers import (
    Answer,
    Position,
    Question,
    log_probability,
    position,
)
from quantwatch.models.served.dialect import (
    PLAIN,
    Said,
    ask_once,
    choose_model,
    count,
    first_choice,
    plain_facts,
    same_count,
    same_tokens,
    stamp_of,
    table,
    token_id,
)
from quantwatch.models.served.freshness import Freshness
from quantwatch.models.served.http import JsonClient
from quantwatch.models.served.trouble import GarbledAnswerError, UnusableServerError


class Vllm:
    """Speaks with vLLM."""

    always_tells_target = True

    def identify(self, client: JsonClient, wanted: str | None) -> Said:
        """Return model, root, longest context and version."""
        record = choose_model(client, wanted)
        version = table(client.get("/version"))
        facts = plain_facts(record, "id", "root", "parent", "owned_by", "max_model_len")
        facts |= plain_facts(version, "version")
        return Said(str(record["id"]), facts, context=count(record.get("max_model_len")))

    def ask(self, client: JsonClient, question: Question, freshness: Freshness) -> Answer:
        """Return a prompt's positions from one request."""

        def body() -> dict[str, Any]:
            return {
                "model": question.model,
                "prompt": list(question.ids),
                "prompt_logprobs": question.top_k,
                "max_tokens": 1,
                **PLAIN,
                "add_special_tokens": False,
                "return_token_ids": True,
                "cache_salt": secrets.token_hex(16),
            }

        read = partial(_read, question=question)
        return ask_once(client, "/v1/completions", body, read, freshness)


def _read(document: Any, question: Question) -> Answer:
    choice = first_choice(document)
    said = choice.get("prompt_logprobs")
    usage = table(document.get("usage")) if isinstance(document, dict) else {}
    same_tokens(choice.get("prompt_token_ids"), question.ids)
    if (scored := count(usage.get("prompt_tokens"))) is not None:
        same_count(scored, len(question.ids))
    if not isinstance(said, list):
        raise GarbledAnswerError("the answer has no prompt_logprobs")
    same_count(len(said), len(question.ids))
    cached = count(table(usage.get("prompt_tokens_details")).get("cached_tokens")) or 0
    found = tuple(_position(said[at], at, question, cached) for at in question.targets)
    return Answer(found, stamp_of(document))


def _position(said: Any, at: int, question: Question, cached: int) -> Position | str:
    if at <= cached:
        return "read from the server's prefix cache (stale)"
    if said is None:
        return "null"
    if not isinstance(said, dict):
        return "no table of log-probabilities"
    entries = [(_id(key), table(value).get("logprob")) for key, value in said.items()]
    target = dict(entries).get(question.ids[at])
    read = log_probability(target) if target is not None else None
    found = position(entries, question.top_k, read, most_ids=question.most_ids)
    if not isinstance(found, str) and target is None:
        raise UnusableServerError(
            f"the server scored another token than it was sent: {question.ids[at]} at position "
            f"{at} is not among its log-probabilities (another tokenizer?)"
        )
    return found


def _id(key: str) -> int | str:
    """Return the id that a key says, the key itself where it says none: that is told then."""
    told = token_id(key)
    return key if told is None else told
