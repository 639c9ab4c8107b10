"""SGLang: `/generate` with `return_logprob`, `logprob_start_len` 0 and `top_logprobs_num`.

The answer's `meta_info` has `input_token_logprobs` and `input_top_logprobs`, one entry per prompt
token, as [log-probability, token id, text]; the first token has none. Positions before its
`cached_tokens` were not computed for this request and don't count.
"""

from functools import partial
from typing import Any

from quantwatch.models.served.answers import (
    Answer,
    Position,
    Question,
    Stamp,
    log_probability,
    position,
    require_one_row,
)
from quantwatch.models.served.dialect import (
    PLAIN,
    Said,
    ask_once,
    choose_model,
    count,
    plain_facts,
    same_count,
    same_tokens,
    table,
    text,
)
from quantwatch.models.served.freshness import Freshness
from quantwatch.models.served.http import JsonClient
from quantwatch.models.served.trouble import GarbledAnswerError

_OF_MODEL = ("model_path", "tokenizer_path", "weight_version")
# The server's own record holds its API key as well: only these are read.
_OF_SERVER = (
    *("version", "dtype", "quantization", "kv_cache_dtype", "attention_backend"),
    *("tp_size", "context_length"),
)
_STALE = "read from the server's prefix cache (stale)"


class Sglang:
    """Speaks with SGLang."""

    always_tells_target = True

    def identify(self, client: JsonClient, wanted: str | None) -> Said:
        """Return model, paths, dtypes, version and longest context."""
        record = choose_model(client, wanted)
        facts = plain_facts(record, "id", "root", "max_model_len")
        facts |= plain_facts(_either(client, "/get_model_info", "/model_info"), *_OF_MODEL)
        facts |= plain_facts(_either(client, "/get_server_info", "/server_info"), *_OF_SERVER)
        context = count(record.get("max_model_len")) or count(facts.get("context_length"))
        return Said(str(record["id"]), facts, context=context)

    def ask(self, client: JsonClient, question: Question, freshness: Freshness) -> Answer:
        """Return a prompt's positions from one request."""
        body = {
            "input_ids": list(question.ids),
            "sampling_params": {"max_new_tokens": 1, **PLAIN},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": question.top_k,
            "return_text_in_logprobs": False,
        }
        read = partial(_read, question=question)
        return ask_once(client, "/generate", lambda: body, read, freshness)


def _either(client: JsonClient, *paths: str) -> dict[str, Any]:
    """Return the record at the first path that there is: they were renamed."""
    return next((table(said) for path in paths if (said := client.get(path)) is not None), {})


def _read(document: Any, question: Question) -> Answer:
    meta = table(table(document).get("meta_info"))
    tokens, tops = meta.get("input_token_logprobs"), meta.get("input_top_logprobs")
    if not isinstance(tokens, list) or not isinstance(tops, list):
        raise GarbledAnswerError("the answer has no input_token_logprobs and input_top_logprobs")
    if (scored := count(meta.get("prompt_tokens"))) is not None:
        same_count(scored, len(question.ids))
    same_tokens([_pair(entry)[0] for entry in tokens], question.ids)
    if len(tops) != len(tokens):
        raise GarbledAnswerError(f"{len(tops)} input_top_logprobs for {len(tokens)} tokens")
    cached = count(meta.get("cached_tokens")) or 0
    found = [
        _STALE if at <= cached else _position(tokens[at], tops[at], question)
        for at in range(1, len(question.ids))
    ]
    require_one_row(found, question.ids)
    stamp = Stamp(fingerprint=text(meta.get("weight_version")), request=text(meta.get("id")))
    return Answer(tuple(found[question.first :]), stamp)


def _position(token: Any, top: Any, question: Question) -> Position | str:
    target = _pair(token)[1]
    if target is None or top is None:
        return "null"
    if not isinstance(top, list):
        return "no list of log-probabilities"
    entries = [_pair(entry) for entry in top]
    value = log_probability(target)
    return position(entries, question.top_k, value, most_ids=question.most_ids)


def _pair(entry: Any) -> tuple[Any, Any]:
    """Return id and log-probability of [log-probability, id, text]."""
    whole = isinstance(entry, list) and len(entry) >= 2
    return (entry[1], entry[0]) if whole else (None, None)
