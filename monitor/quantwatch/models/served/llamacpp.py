"""llama.cpp's server: `/completion`, one token at a time, since it tells nothing of prompts.

For each position a request with the tokens up to there, `n_predict` 1 and `n_probs` k: the answer's
`completion_probabilities[0].top_logprobs` are the k likeliest next tokens, as softmax of the plain
logits (`post_sampling_probs` false). `cache_prompt` keeps what the request before computed, so each
evaluates one token, as in decoding. A target beyond the k is not told.
"""

from typing import Any

from quantwatch.models.served.answers import Answer, Position, Question, Stamp, position
from quantwatch.models.served.dialect import (
    Said,
    choose_model,
    count,
    plain_facts,
    same_count,
    table,
    text,
)
from quantwatch.models.served.freshness import Freshness
from quantwatch.models.served.http import JsonClient
from quantwatch.models.served.trouble import GarbledAnswerError, NoAnswerError, UnusableServerError


class Llamacpp:
    """Speaks with llama.cpp's server."""

    always_tells_target = False

    def identify(self, client: JsonClient, wanted: str | None) -> Said:
        """Return model, file, build, context, vocabulary and size."""
        record = choose_model(client, wanted)
        meta, props = table(record.get("meta")), table(client.get("/props"))
        facts = plain_facts(record, "id") | plain_facts(props, "model_path", "build_info")
        facts |= plain_facts(meta, "n_vocab", "n_params", "size", "n_ctx_train")
        context = table(props.get("default_generation_settings")).get("n_ctx")
        facts |= plain_facts({"n_ctx": context}, "n_ctx")
        return Said(
            str(record["id"]),
            facts,
            context=count(context),
            num_tokens=count(meta.get("n_vocab")),
            num_bytes=count(meta.get("size")),
            num_weights=count(meta.get("n_params")),
        )

    def ask(self, client: JsonClient, question: Question, freshness: Freshness) -> Answer:
        """Return a prompt's positions from as many requests; after one that fails, no more."""
        found: list[Position | str] = []
        stamp, trouble = Stamp(), ""
        for at in question.targets:
            if trouble:
                found.append(trouble)
                continue
            try:
                one, stamp = _ask_one(client, question, at, freshness)
                found.append(one)
            except NoAnswerError as error:
                trouble = str(error)
                found.append(trouble)
        if trouble and all(each == trouble for each in found):
            raise NoAnswerError(trouble)
        return Answer(tuple(found), stamp)


def _ask_one(
    client: JsonClient, question: Question, at: int, freshness: Freshness
) -> tuple[Position | str, Stamp]:
    body = {
        "model": question.model,  # of a router with several
        "prompt": list(question.ids[:at]),
        "n_predict": 1,
        "n_probs": question.top_k,
        "temperature": 0.0,
        "cache_prompt": True,
        "post_sampling_probs": False,
    }

    def checked(document: Any) -> tuple[Position | str, Stamp]:
        record = table(document)
        stamp = Stamp(
            model=text(record.get("model")), fingerprint=text(record.get("system_fingerprint"))
        )
        freshness.check(stamp)
        return _read(record, question, at), stamp

    found: tuple[Position | str, Stamp] = client.post("/completion", lambda: body, checked)
    return found


def _read(record: dict[str, Any], question: Question, at: int) -> Position | str:
    if record.get("truncated") is True:
        raise UnusableServerError(f"the server cut a prompt of {at} tokens to its context")
    if (evaluated := count(record.get("tokens_evaluated"))) is not None:
        same_count(evaluated, at)
    if "content" not in record:
        raise GarbledAnswerError("the answer has no content")
    said = record.get("completion_probabilities")
    if not isinstance(said, list) or not said:
        # The key is left out where nothing whole was generated: a part of a character, an end.
        return "no probabilities (a part of a character?)"
    tops = table(said[0]).get("top_logprobs")
    if not isinstance(tops, list):
        return "no list of log-probabilities"
    entries = [(table(each).get("id"), table(each).get("logprob")) for each in tops]
    found = position(entries, question.top_k, None, most_ids=question.most_ids)
    if isinstance(found, str):
        return found
    known = dict(zip(found.ids, found.logprobs, strict=True))
    return Position(found.ids, found.logprobs, known.get(question.ids[at]))
