"""Four protocols over real HTTP, and a server that does everything wrong that one can."""

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.served.conftest import NUM_WORDS, WORDS
from tests.monitor.served.front_end import Document, FrontEnd, Reply

from quantwatch.capture.served_answers import Answers
from quantwatch.config.schema import VariantConfig
from quantwatch.domain import Prompt, Suite
from quantwatch.errors import ConfigError, IncompatibleError, ModelError
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant
from quantwatch.models.served.answers import Position, Positions
from quantwatch.models.served.model import ServedModel
from quantwatch.models.served.opening import open_served
from quantwatch.models.served.trouble import UnusableServerError
from quantwatch.observability import redaction
from quantwatch_kernels.compare.served import served_statistics

APIS = ("vllm", "sglang", "llamacpp", "openai")
PATHS = {
    "vllm": "/v1/completions", "sglang": "/generate", "llamacpp": "/completion",
    "openai": "/v1/completions",
}  # fmt: skip
IDS = (5, 17, 3, 88, 41, 9, 60, 2)
PROMPT = Prompt(0, "own", "test", IDS, tuple(WORDS[i] for i in IDS))
SUITE = Suite("s", "0" * 64, (PROMPT,), vocabulary=tuple(WORDS))
TOP_K = 10


@pytest.fixture(scope="module")
def reference(folder: Path) -> LoadedModel:
    config = VariantConfig(model=str(folder / "tiny"))
    return load_variant("reference", config, base_dir=folder, cache_dir=folder / "cache")


Open = Callable[..., ServedModel]


@pytest.fixture
def opened(server: FrontEnd, reference: LoadedModel) -> Open:
    def build(
        api: str = "vllm", *, suite: Suite = SUITE, env: Any = None, **served: Any
    ) -> ServedModel:
        known = {"url": server.url, "api": api, "top_k": TOP_K, "timeout_s": 5.0}
        config = VariantConfig.model_validate({"served": known | served})
        return open_served("cand", config, reference, suite, env=env or {}, sleep=waits.append)

    waits: list[float] = []
    build.waits = waits  # type: ignore[attr-defined]
    return build


def waited(opened: Open) -> list[float]:
    found: list[float] = opened.waits  # type: ignore[attr-defined]
    return found


def once(*faults: Any) -> Callable[[FrontEnd, str, Document], Any]:
    """Answer the first questions with these, all later ones as they are."""
    left = list(faults)

    def fault(_: FrontEnd, path: str, document: Document) -> Any:
        asked = path in PATHS.values()
        if not (asked and left):
            return document
        first = left.pop(0)
        return first(document) if callable(first) else first

    return fault


def always(change: Callable[[Document], Any]) -> Callable[[FrontEnd, str, Document], Any]:
    return lambda _, path, document: change(document) if path in PATHS.values() else document


def reasons(positions: Positions) -> list[str]:
    return [one if isinstance(one, str) else "" for one in positions]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("score_start", [0, 3])
def test_every_protocol_tells_the_same(
    api: str, score_start: int, opened: Open, server: FrontEnd
) -> None:
    """Catches an entry read one position off, and positions that are not scored."""
    prompt = replace(PROMPT, score_start=score_start)
    positions = opened(api).ask(prompt)
    rows = server.logprobs(list(IDS))
    assert len(positions) == len(IDS) - 1 - score_start
    for at, found in enumerate(positions, score_start):
        assert isinstance(found, Position)
        values, ids = rows[at].sort(descending=True, stable=True)
        assert found.ids == tuple(ids[:TOP_K].tolist())
        assert found.logprobs == pytest.approx(values[:TOP_K].tolist(), abs=1e-5)
        target = rows[at, IDS[at + 1]].item()
        if api == "llamacpp" and IDS[at + 1] not in found.ids:
            assert found.target is None
        else:
            assert found.target == pytest.approx(target, abs=1e-5)


def test_a_prompt_without_next_tokens_is_not_asked(opened: Open, server: FrontEnd) -> None:
    model = opened()
    assert model.ask(replace(PROMPT, token_ids=IDS[:1])) == ()
    assert model.ask(replace(PROMPT, score_start=len(IDS) - 1)) == ()
    assert server.asked("/v1/completions") == []


def test_vllm_is_asked_past_its_prefix_cache(opened: Open, server: FrontEnd) -> None:
    """Catches answers that depend on which prompts were asked before (vllm#42019)."""
    model = opened("vllm")
    model.ask(PROMPT)
    model.ask(PROMPT)
    one, two = server.asked("/v1/completions")
    assert one["cache_salt"] != two["cache_salt"]
    assert one["prompt"] == list(IDS)
    assert (one["prompt_logprobs"], one["max_tokens"], one["temperature"]) == (TOP_K, 1, 1.0)
    assert one["add_special_tokens"] is False


def test_another_attempt_does_not_meet_what_the_first_one_left(
    opened: Open, server: FrontEnd
) -> None:
    """Catches a retry that is read from the cache of the attempt that timed out."""
    server.fault = once(Reply(503))
    opened("vllm").ask(PROMPT)
    one, two = server.asked("/v1/completions")
    assert one["cache_salt"] != two["cache_salt"]


def test_llamacpp_is_asked_a_token_at_a_time(opened: Open, server: FrontEnd) -> None:
    opened("llamacpp").ask(replace(PROMPT, score_start=2))
    asked = server.asked("/completion")
    assert [body["prompt"] for body in asked] == [list(IDS[:n]) for n in range(3, len(IDS))]
    assert all(body["cache_prompt"] and not body["post_sampling_probs"] for body in asked)


# -- positions that are missing ------------------------------------------------------------------


def _vllm_row(change: Callable[[Any], Any], at: int = 3) -> Callable[[Document], Document]:
    def changed(document: Document) -> Document:
        rows = document["choices"][0]["prompt_logprobs"]
        rows[at] = change(rows[at])
        return document

    return changed


def _of_first(**fields: Any) -> Callable[[Any], Any]:
    def changed(row: Any) -> Any:
        first = next(iter(row))
        return row | {first: row[first] | fields}

    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: None, "null"),
        (lambda row: dict(list(row.items())[:4]), "4 of 10"),
        (_of_first(logprob=float("nan")), "NaN"),
        (_of_first(logprob=0.5), "above 0"),
        (_of_first(logprob=None), "no number"),
        (lambda row: {k: v | {"logprob": -0.1} for k, v in row.items()}, "more than 1"),
        (lambda _: [1, 2], "no table"),
        (lambda row: {f"<{k}>": v for k, v in row.items()}, "token id is"),
        (lambda _: {"0": {"logprob": 0.0}}, "1 of 10"),
        (lambda row: {f"9{k:0>10}": v for k, v in row.items()}, "token id is"),
    ],
    ids=[
        "null",
        "few",
        "nan",
        "positive",
        "no number",
        "sum",
        "list",
        "texts",
        "unwritten",
        "huge",
    ],
)
def test_one_bad_position_is_missing_alone(
    change: Any, words: str, opened: Open, server: FrontEnd
) -> None:
    """Catches a position that becomes a 0, and one that takes its prompt along."""
    server.fault = always(_vllm_row(change))
    model = opened()
    positions = model.ask(PROMPT)
    assert [bool(why) for why in reasons(positions)] == [n == 2 for n in range(len(IDS) - 1)]
    assert words in reasons(positions)[2]
    assert model.missing.total() == 1


def _cached(document: Document) -> Document:
    if "usage" in document:
        document["usage"]["prompt_tokens_details"] = {"cached_tokens": 4}
    else:
        document["meta_info"]["cached_tokens"] = 4
        document["meta_info"]["input_token_logprobs"][2][0] = 0.0  # whatever was in the buffer
    return document


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_positions_from_a_prefix_cache_are_stale(api: str, opened: Open, server: FrontEnd) -> None:
    server.fault = always(_cached)
    found = reasons(opened(api).ask(PROMPT))
    assert ["stale" in why for why in found] == [True] * 4 + [False] * 3


def test_sglang_entries_without_values_are_missing(opened: Open, server: FrontEnd) -> None:
    def change(document: Document) -> Document:
        meta = document["meta_info"]
        meta["input_top_logprobs"][2] = None
        meta["input_token_logprobs"][4][0] = None
        meta["input_top_logprobs"][6] = "?"
        return document

    server.fault = always(change)
    found = reasons(opened("sglang").ask(PROMPT))
    assert found == ["", "null", "", "null", "", "no list of log-probabilities", ""]


def test_llamacpp_without_a_token_is_missing(opened: Open, server: FrontEnd) -> None:
    """A part of a character leaves no probabilities: the key isn't there. Asking again is no use."""

    def without(document: Document) -> Document:
        del document["completion_probabilities"]
        return document

    server.fault = once(lambda d: d, without, lambda d: d | {"completion_probabilities": []})
    found = reasons(opened("llamacpp").ask(PROMPT))
    assert ["no probabilities" in why for why in found] == [False, True, True, *[False] * 4]
    assert len(server.asked("/completion")) == len(IDS) - 1


def test_openai_texts_that_are_ambiguous_count_as_the_rest(opened: Open, server: FrontEnd) -> None:
    """Catches a text of two ids that is taken for one of them."""
    twice = list(WORDS)
    twice[7] = twice[8]
    rows = server.logprobs(list(IDS))
    positions = opened("openai", suite=replace(SUITE, vocabulary=tuple(twice))).ask(PROMPT)
    seen = 0
    for row, found in zip(rows, positions, strict=False):
        assert isinstance(found, Position)
        top = row.topk(TOP_K).indices.tolist()
        assert [-1 if i in (7, 8) else i for i in top] == list(found.ids)
        seen += bool({7, 8} & set(top))
    assert seen


def _split_characters() -> tuple[str, ...]:
    """Return the server's texts where every third id is a part of a character: all look alike."""
    return tuple("\ufffd" if i % 3 == 0 else text for i, text in enumerate(WORDS))


def _target_last(_: FrontEnd, path: str, document: Document) -> Document:
    return document


def _target_first(front_end: FrontEnd, path: str, document: Document) -> Document:
    """vLLM's order: the token that came, then the likeliest; of one text the last one stands."""
    if path == "/v1/completions":
        rows = front_end.logprobs(list(IDS))
        choice = document["choices"][0]["logprobs"]
        for at, row in enumerate(rows[:-1]):
            every = dict.fromkeys([IDS[at + 1], *row.topk(TOP_K).indices.tolist()])
            choice["top_logprobs"][at + 1] = {front_end.texts[i]: row[i].item() for i in every}
    return document


@pytest.mark.parametrize("order", [_target_last, _target_first])
def test_openai_texts_that_fall_together_hide_no_rank(
    order: Any, opened: Open, server: FrontEnd
) -> None:
    """Catches a second-likeliest token taken for the first: an object has each text once.

    What is hidden may be anything that the told ones leave over: what could be in front of it is
    not ranked, what can't is. Bounds hold whatever is hidden.
    """
    server.texts, server.fault = _split_characters(), order
    rows = server.logprobs(list(IDS)).double()
    positions = opened("openai").ask(PROMPT)
    hidden = 0
    for row, found in zip(rows, positions, strict=False):
        assert isinstance(found, Position)
        assert len(found.ids) == TOP_K
        first, known = found.ids[0], [i for i in found.ids if i >= 0]
        assert first in (-1, int(row.argmax()))
        if -1 not in found.ids[:5]:
            assert list(found.ids[:5]) == row.topk(5).indices.tolist()
        for token, logprob in zip(found.ids, found.logprobs, strict=True):
            assert token == -1 or logprob == pytest.approx(float(row[token]), abs=1e-6)
        assert not any(token % 3 == 0 for token in known)
        hidden += TOP_K - len(set(known)) > 1
    assert hidden
    seed = torch.Generator().manual_seed(0)
    reference = torch.randn(len(positions), NUM_WORDS, dtype=torch.float64, generator=seed)
    told = Answers.of(positions, opened("openai")).told
    bounds = served_statistics(
        reference,
        told,
        torch.tensor(IDS[1:]),
        reference_dtype=torch.float32,
        candidate_dtype=torch.float32,
    )
    log_p = torch.log_softmax(reference, -1)
    kl = (log_p.exp() * (log_p - rows[:-1])).sum(-1)
    tv = 0.5 * (log_p.exp() - rows[:-1].exp()).abs().sum(-1)
    assert (bounds.served_kl <= kl + 1e-9).all()
    assert (bounds.served_tv <= tv + 1e-9).all()
    assert (tv <= bounds.served_tv_most + 1e-9).all()


def test_openai_a_certain_token_is_ranked_beside_hidden_ones(
    opened: Open, server: FrontEnd
) -> None:
    """Catches a position that is thrown away whole for two unlikely bytes."""

    def sure(document: Document) -> Document:
        row = {"w7": math.log(0.9), "\ufffd": math.log(0.02)} | {
            f"w{20 + i}": math.log(0.005) for i in range(7)
        }
        said = document["choices"][0]["logprobs"]
        said["top_logprobs"] = [None, *([row] * (len(said["tokens"]) - 1))]
        said["token_logprobs"] = [None, *([math.log(0.005)] * (len(said["tokens"]) - 1))]
        return document

    server.fault = always(sure)
    for found in opened("openai").ask(PROMPT):
        assert isinstance(found, Position)
        # One of ten is hidden, and the token that came: together they have 0.045 at most.
        assert found.ids[:4] == (7, -1, -1, -1)
        assert found.logprobs[1:4] == pytest.approx(
            [math.log(0.045), math.log(0.0225), math.log(0.02)], abs=1e-3
        )


def test_openai_texts_without_their_spaces_are_refused(opened: Open, server: FrontEnd) -> None:
    """Catches " w3" taken for "w3": a server that decodes tokens one by one drops the space."""
    ours = list(WORDS)
    ours[41], ours[42] = " same", "same"
    server.texts = tuple(text.strip() for text in ours)
    with pytest.raises(UnusableServerError, match=r"position 4 it writes 'same' for id 41, .* 42"):
        opened("openai", suite=replace(SUITE, vocabulary=tuple(ours))).ask(PROMPT)


def test_openai_ids_may_be_told_as_texts(opened: Open, server: FrontEnd) -> None:
    """vLLM's return_tokens_as_token_ids."""
    server.texts = tuple(f"token_id:{i}" for i in range(NUM_WORDS))
    positions = opened("openai").ask(PROMPT)
    assert all(isinstance(one, Position) and -1 not in one.ids for one in positions)


# -- answers that no distribution gives ----------------------------------------------------------


Logprobs = Callable[[float], float]


def _every(change: Logprobs) -> Callable[[Document], Document]:
    """Change every log-probability of an answer in any protocol."""

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(each) for each in value]
        if isinstance(value, dict):
            return {name: walk(each) for name, each in value.items()}
        return change(value) if isinstance(value, float) and value <= 0 else value

    return walk


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "change",
    [lambda v: v - 30.0, lambda v: v / math.log(2) - 1e-9, lambda v: 3 * v, lambda _: -9999.0],
    ids=["logits", "base 2", "colder", "nothing at all"],
)
def test_values_that_leave_too_little_are_missing(
    api: str, change: Logprobs, opened: Open, server: FrontEnd
) -> None:
    """Catches plain logits and another base: numbers ≤ 0 that look like log-probabilities.

    The model is sharp, so the rest has hardly anything: what is told has to make up for 1.
    """
    log_q = server.logprobs(list(IDS))
    flat = {at for at, row in enumerate(log_q[:-1]) if change(float(row.max())) > -0.2}
    server.fault = always(_every(change))
    found = reasons(opened(api).ask(PROMPT))
    assert len(flat) <= 1
    assert all("less than 1" in why for at, why in enumerate(found) if at not in flat)


def _later(document: Document) -> Document:
    """Tables one position behind the tokens, as when chunks of a prefill are joined wrongly."""
    if "meta_info" in document:
        tops = document["meta_info"]["input_top_logprobs"]
    else:
        tops = document["choices"][0]["logprobs"]["top_logprobs"]
    tops[3:] = tops[2:-1]
    return document


@pytest.mark.parametrize("api", ["sglang", "openai"])
@pytest.mark.parametrize("start", [0, 4])
def test_tables_of_other_positions_are_refused(
    api: str, start: int, opened: Open, server: FrontEnd
) -> None:
    """Catches numbers of the right prompt at the wrong place: each alone is plausible."""
    server.fault = always(_later)
    with pytest.raises(UnusableServerError, match=r"not of one position: of token \d+ at position"):
        opened(api).ask(replace(PROMPT, score_start=start))


@pytest.mark.parametrize("api", ["vllm", "sglang", "openai"])
def test_a_servers_own_sampler_is_switched_off(api: str, opened: Open, server: FrontEnd) -> None:
    """Catches log-probabilities of what the model's generation_config.json makes of logits."""
    opened(api).ask(PROMPT)
    body = server.asked(PATHS[api])[0]
    asked = body.get("sampling_params", body)
    known = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    if api != "openai":  # which refuses what it doesn't know
        known |= {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: asked.get(name) for name in known} == known


def test_a_router_is_told_which_model(opened: Open, server: FrontEnd) -> None:
    """Several models behind one llama.cpp: the request names its own."""
    opened("llamacpp").ask(PROMPT)
    assert {body["model"] for body in server.asked("/completion")} == {"tiny-int8"}


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_ids_as_texts_are_no_ids(api: str, opened: Open, server: FrontEnd) -> None:
    def change(document: Document) -> Document:
        if "meta_info" in document:
            for entry in document["meta_info"]["input_token_logprobs"]:
                entry[1] = str(entry[1])
        else:
            choice = document["choices"][0]
            choice["prompt_token_ids"] = list(map(str, choice["prompt_token_ids"]))
        return document

    server.fault = always(change)
    with pytest.raises(UnusableServerError, match="at position 0 it has '5', not 5"):
        opened(api).ask(PROMPT)


# -- answers that fail, and are asked for again --------------------------------------------------


def _hang(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(0.6)


def _cut(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "500")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')


def _drop(handler: BaseHTTPRequestHandler) -> None:
    pass


TRANSIENT = {
    "429": Reply(429),
    "500": Reply(500, b"oops"),
    "503": Reply(503),
    "cut off": Reply(misbehave=_cut),
    "hung up": Reply(misbehave=_drop),
    "half a document": Reply(200, b'{"choices": [{"prompt_logprobs": [null, {'),
    "no json": Reply(200, b"<html>gateway</html>"),
    "too deep": Reply(200, b"[" * 100_000),
    "nothing asked for": Reply(200, b"{}"),
    "a list": Reply(200, b"[1]"),
    "no choices": Reply(200, b'{"choices": []}'),
    "choices of another kind": Reply(200, b'{"choices": 3}'),
    "a number of 400 digits": Reply(200, b'{"created": ' + b"1" * 400 + b', "choices": []}'),
}


@pytest.mark.parametrize("name", TRANSIENT)
@pytest.mark.parametrize("api", APIS)
def test_a_failing_answer_is_asked_for_again(
    name: str, api: str, opened: Open, server: FrontEnd
) -> None:
    """Catches a hiccup that loses a prompt, in any protocol."""
    server.fault = once(TRANSIENT[name], TRANSIENT[name])
    model = opened(api)
    assert reasons(model.ask(PROMPT)) == [""] * (len(IDS) - 1)
    assert model.client.num_retries == 2
    assert waited(opened) == [0.5, 1.0]


@pytest.mark.parametrize("name", TRANSIENT)
def test_a_prompt_that_keeps_failing_is_missing(name: str, opened: Open, server: FrontEnd) -> None:
    server.fault = once(*[TRANSIENT[name]] * 3)
    model = opened(attempts=3)
    found = reasons(model.ask(PROMPT))
    assert len(found) == len(IDS) - 1
    assert all(found)
    assert model.missing.total() == len(IDS) - 1
    assert reasons(model.ask(PROMPT)) == [""] * (len(IDS) - 1), "the next prompt is fine"


def test_a_slow_answer_is_a_time_out(opened: Open, server: FrontEnd) -> None:
    server.fault = once(Reply(misbehave=_hang))
    model = opened(timeout_s=0.3, attempts=1)
    assert "timeout" in reasons(model.ask(PROMPT))[0]


def test_a_server_may_say_how_long_to_wait(opened: Open, server: FrontEnd) -> None:
    server.fault = once(
        Reply(429, headers={"retry-after": "7"}), Reply(503, headers={"retry-after": "86400"})
    )
    opened().ask(PROMPT)
    assert waited(opened) == [7.0, 30.0], "asked for, and bounded"


def test_too_long_an_answer_is_not_read(
    opened: Open, server: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(attempts=1)
    monkeypatch.setattr("quantwatch.models.served.http.MOST_BYTES", 100)
    assert "more than" in reasons(model.ask(PROMPT))[0]


def test_a_server_that_answers_nothing_is_given_up(opened: Open, server: FrontEnd) -> None:
    """Catches an hour of time-outs, prompt after prompt."""
    server.fault = always(lambda _: Reply(503))
    model = opened(attempts=2)
    model.ask(PROMPT)
    model.ask(PROMPT)
    with pytest.raises(UnusableServerError, match="no answer to 3 prompts in a row: HTTP 503"):
        model.ask(PROMPT)
    assert len(server.asked("/v1/completions")) == 6


def test_llamacpp_stops_at_the_token_that_fails(opened: Open, server: FrontEnd) -> None:
    """Catches a time-out for every one of a thousand tokens."""
    server.fault = once(lambda d: d, lambda d: d, Reply(500), Reply(500))
    found = reasons(opened("llamacpp", attempts=2).ask(PROMPT))
    assert found == ["", "", *["HTTP 500"] * 5]
    assert len(server.asked("/completion")) == 4


def test_an_answer_that_was_given_before_is_stale(opened: Open, server: FrontEnd) -> None:
    """Catches a cache that doesn't look at the question."""
    kept: list[Document] = []

    def cache(document: Document) -> Document:
        kept.append(copy.deepcopy(document))
        return kept[0]

    server.fault = always(cache)
    model = opened(attempts=2)
    assert reasons(model.ask(PROMPT)) == [""] * (len(IDS) - 1)
    assert set(reasons(model.ask(PROMPT))) == {"an answer that was given before (stale)"}


# -- servers that are not what was asked for -----------------------------------------------------


def _with_bos(document: Document) -> Document:
    """What a server answers that put a BOS in front."""
    if "meta_info" in document:
        meta = document["meta_info"]
        meta["input_token_logprobs"].insert(1, [-1.0, 0, None])
        meta["input_top_logprobs"].insert(1, meta["input_top_logprobs"][1])
        meta["prompt_tokens"] += 1
    elif "completion_probabilities" in document:
        document["tokens_evaluated"] += 1
    elif "prompt_logprobs" in document["choices"][0]:
        choice = document["choices"][0]
        choice["prompt_logprobs"].insert(1, choice["prompt_logprobs"][1])
        choice["prompt_token_ids"] = [0, *choice["prompt_token_ids"]]
    else:
        for values in document["choices"][0]["logprobs"].values():
            values.insert(1, values[1])
    return document


@pytest.mark.parametrize("api", APIS)
def test_a_bos_put_in_front_is_refused(api: str, opened: Open, server: FrontEnd) -> None:
    """Catches positions compared one off: every number is wrong, and plausible."""
    server.fault = always(_with_bos)
    with pytest.raises(UnusableServerError, match=r"scored (other tokens|\d tokens where)"):
        opened(api).ask(PROMPT)


def _swapped(document: Document) -> Document:
    """What a server answers whose tokenizer has two ids swapped."""
    if "meta_info" in document:
        document["meta_info"]["input_token_logprobs"][3][1] = 87
    elif "prompt_logprobs" in document["choices"][0]:
        document["choices"][0]["prompt_token_ids"][3] = 87
    else:
        document["choices"][0]["logprobs"]["tokens"][3] = "w87"
    return document


@pytest.mark.parametrize("api", ["vllm", "sglang", "openai"])
def test_another_token_is_refused_with_its_position(
    api: str, opened: Open, server: FrontEnd
) -> None:
    server.fault = always(_swapped)
    with pytest.raises(UnusableServerError, match=r"at position 3 it has '?w?87'?, not '?w?88"):
        opened(api).ask(PROMPT)


def test_a_target_that_is_not_told_is_another_token(opened: Open, server: FrontEnd) -> None:
    """An older vLLM doesn't tell which ids it scored, but always the token that came."""

    def change(document: Document) -> Document:
        choice = document["choices"][0]
        del choice["prompt_token_ids"]
        row = choice["prompt_logprobs"][5]
        row.pop(str(IDS[5]))
        for token in range(NUM_WORDS):
            if len(row) < TOP_K and str(token) not in row and token != IDS[5]:
                row[str(token)] = {"logprob": -20.0}
        return document

    server.fault = always(change)
    with pytest.raises(UnusableServerError, match="9 at position 5 is not among"):
        opened().ask(PROMPT)


def test_a_prompt_that_was_cut_is_refused(opened: Open, server: FrontEnd) -> None:
    server.fault = always(lambda d: d | {"truncated": True})
    with pytest.raises(UnusableServerError, match="cut a prompt"):
        opened("llamacpp").ask(PROMPT)


def test_texts_of_another_vocabulary_are_refused(opened: Open, server: FrontEnd) -> None:
    """Catches a server of which nothing can be told, and all is the rest."""

    def change(document: Document) -> Document:
        logprobs = document["choices"][0]["logprobs"]
        logprobs["tokens"] = ["\ufffd"] * len(logprobs["tokens"])
        tops = logprobs["top_logprobs"]
        logprobs["top_logprobs"] = [
            None, *({f"?{n}": v for n, v in enumerate(row.values())} for row in tops[1:])
        ]  # fmt: skip
        return document

    server.fault = always(change)
    with pytest.raises(UnusableServerError, match="stands for one id"):
        opened("openai").ask(PROMPT)


@pytest.mark.parametrize(
    ("api", "change", "words"),
    [
        ("vllm", {"model": "other"}, "its model is 'other', was 'tiny-int8'"),
        ("vllm", {"system_fingerprint": "fp-2"}, "fingerprint is 'fp-2'"),
        ("llamacpp", {"model": "other.gguf"}, "its model is 'other.gguf'"),
    ],
)
def test_a_server_restarted_with_another_model_is_refused(
    api: str, change: Document, words: str, opened: Open, server: FrontEnd
) -> None:
    model = opened(api)
    model.ask(PROMPT)
    server.fault = always(lambda document: document | change)
    with pytest.raises(UnusableServerError, match=words):
        model.ask(PROMPT)


def test_sglang_weights_that_were_updated_are_another_model(opened: Open, server: FrontEnd) -> None:
    model = opened("sglang")
    model.ask(PROMPT)
    server.weight_version = "step-100"
    with pytest.raises(UnusableServerError, match="fingerprint is 'step-100'"):
        model.ask(PROMPT)


def test_what_it_says_of_itself_must_be_the_same_at_the_end(opened: Open, server: FrontEnd) -> None:
    model = opened()
    model.require_same()
    server.version = "0.12.0"
    with pytest.raises(UnusableServerError, match=r"its version is '0\.12\.0', was '0\.11\.0'"):
        model.require_same()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_without_a_value_say_nothing(value: float, opened: Open, server: FrontEnd) -> None:
    """Catches a NaN that is another server each time, and an answer newer than all later ones."""
    server.version = value
    server.fault = always(lambda document: document | {"created": value})
    model = opened()
    model.require_same()
    for _ in range(2):
        assert reasons(model.ask(PROMPT)) == [""] * (len(IDS) - 1)


def test_asked_again_it_differs_by_its_own_noise(opened: Open, server: FrontEnd) -> None:
    model = opened()
    before = model.ask(PROMPT)
    assert model.repeat(PROMPT, before) == 0.0
    plain = server.model

    def noisy(ids: Any) -> Any:
        logits = plain(ids).logits
        return logits + 0.01 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))

    server.model = noisy
    assert model.repeat(PROMPT, before) == pytest.approx(0.02, abs=0.02)
    server.fault = always(lambda _: Reply(500))
    assert model.repeat(PROMPT, before) is None


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_refused_request_is_not_repeated(status: int, opened: Open, server: FrontEnd) -> None:
    body = b'{"error": "max-logprobs is 5, Bearer sk-secret-0123456789"}'
    server.fault = always(lambda _: Reply(status, body))
    with pytest.raises(UnusableServerError, match=f"HTTP {status}: .*max-logprobs is 5") as caught:
        opened().ask(PROMPT)
    assert "sk-secret-0123456789" not in str(caught.value)
    assert len(server.asked("/v1/completions")) == 1


def test_redirects_are_not_followed(opened: Open, server: FrontEnd) -> None:
    """Catches a token, or prompts, sent to another place."""
    server.fault = always(lambda _: Reply(307, headers={"location": "http://127.0.0.1:9/"}))
    with pytest.raises(UnusableServerError, match="redirects"):
        opened().ask(PROMPT)


# -- opening -------------------------------------------------------------------------------------


def test_the_token_comes_from_the_environment_and_is_told_nobody(
    opened: Open, server: FrontEnd
) -> None:
    model = opened(token_env="SERVER_KEY", env={"SERVER_KEY": "sk-abcdef-123456"})
    model.ask(PROMPT)
    assert {headers["authorization"] for _, _, headers in server.requests} == {
        "Bearer sk-abcdef-123456"
    }
    assert "sk-abcdef-123456" not in json.dumps(model.variant.source) + repr(model.variant)
    assert redaction.scrub("key sk-abcdef-123456") == "key [redacted]"
    redaction.forget()


def test_without_its_token_it_is_not_asked(opened: Open, server: FrontEnd) -> None:
    with pytest.raises(ConfigError, match=r"cand: served\.token_env: .*SERVER_KEY is not set"):
        opened(token_env="SERVER_KEY")
    assert server.requests == []


@pytest.mark.parametrize("token", ["sk-é", "sk-\n1"])
def test_a_token_that_no_header_carries_is_named(
    token: str, opened: Open, server: FrontEnd
) -> None:
    with pytest.raises(ConfigError, match="SERVER_KEY has characters that no header can carry"):
        opened(token_env="SERVER_KEY", env={"SERVER_KEY": token})
    assert server.requests == []
    redaction.forget()


def test_no_secret_of_the_server_is_kept(opened: Open) -> None:
    """SGLang tells its own API key to whoever asks for its settings."""
    assert "sk-not-for-you" not in json.dumps(opened("sglang").variant.source)


@pytest.mark.parametrize("api", APIS)
def test_its_fingerprint_is_what_it_says_of_itself(
    api: str, opened: Open, server: FrontEnd
) -> None:
    """Catches identities that change with the time of day, and those that never change."""
    one, two = opened(api).variant, opened(api).variant
    assert one.fingerprint == two.fingerprint
    assert one.fingerprint.weights_sha == "", "nobody knows its weights"
    assert any("its weights are unknown" in note for note in one.notes)
    assert opened(api, top_k=12).variant.fingerprint.serve_sha != one.fingerprint.serve_sha
    server.name = "tiny-int4"
    moved = opened(api).variant.fingerprint
    assert moved.config_sha != one.fingerprint.config_sha


def test_its_size_is_known_only_where_it_is_told(opened: Open) -> None:
    vllm, llamacpp = opened("vllm").variant, opened("llamacpp").variant
    assert (vllm.size_bytes, vllm.bits_per_weight) == (None, None)
    assert (llamacpp.size_bytes, llamacpp.bits_per_weight) == (1000, 16.0)


@pytest.mark.parametrize("api", APIS[:3])
def test_too_short_a_context_is_refused_before_anything_is_asked(
    api: str, opened: Open, server: FrontEnd
) -> None:
    server.context = len(IDS)
    with pytest.raises(UnusableServerError, match="context of 8 tokens is too short for prompt 0"):
        opened(api)
    assert server.asked(PATHS[api]) == []
    server.context = len(IDS) + 1
    opened(api)


def test_a_smaller_vocabulary_is_refused(opened: Open, server: FrontEnd) -> None:
    server.texts = tuple(WORDS[:50])
    with pytest.raises(IncompatibleError, match="96 token ids, the server 50"):
        opened("llamacpp")


def test_a_model_it_does_not_have_is_refused(opened: Open) -> None:
    with pytest.raises(UnusableServerError, match="no model 'other'; it has 'tiny-int8'"):
        opened(model="other")


def test_one_of_several_models_must_be_named(opened: Open, server: FrontEnd) -> None:
    def two(_: FrontEnd, path: str, document: Document) -> Document:
        if path == "/v1/models":
            document["data"].append({"id": "tiny-int4"})
        return document

    server.fault = two
    with pytest.raises(UnusableServerError, match="set model to one of 'tiny-int8', 'tiny-int4'"):
        opened()
    assert opened(model="tiny-int8").variant.source["model"] == "tiny-int8"


@pytest.mark.parametrize("name", ["tiny\ud800", "tiny\0", "\x1b[2J", "t" * 1001])
def test_a_name_that_cannot_be_shown_is_refused(name: str, opened: Open, server: FrontEnd) -> None:
    """Catches an encoding error in the middle of a night, and a transaction that a NUL ends."""
    server.name = name
    with pytest.raises(UnusableServerError, match="a name is at most 1000 characters"):
        opened()


def test_a_name_that_is_a_number_is_a_name(opened: Open, server: FrontEnd) -> None:
    """Catches an error of our own for an id without quotes."""
    server.name = 7  # type: ignore[assignment]
    assert opened().variant.source["model"] == "7"


@pytest.mark.parametrize("version", ["1\ud800", "1\0", "1\x1b[2J", "1" * 300_000])
def test_what_a_server_says_of_itself_can_be_stored(
    version: str, opened: Open, server: FrontEnd
) -> None:
    """Catches words that no database takes, a terminal obeys, or a page can't hold."""
    server.version = version
    said = opened().variant.source["said"]["version"]
    assert said.startswith("1")
    assert said.isprintable()
    assert len(said) <= 1000
    server.fault = lambda *_: Reply(400, version.encode("utf-8", "replace"))
    with pytest.raises(UnusableServerError) as raised:
        opened()
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("body", [b"{}", b'{"data": {}}', b"[]", b'{"data": [3, null]}'])
def test_a_server_without_models_is_refused(body: bytes, opened: Open, server: FrontEnd) -> None:
    server.fault = lambda _, path, document: Reply(200, body) if path == "/v1/models" else document
    with pytest.raises(UnusableServerError, match="lists no models"):
        opened()


def test_a_closed_port_cannot_be_reached(opened: Open) -> None:
    with pytest.raises(ModelError, match=r"127\.0\.0\.1 can't be reached: connect"):
        opened(url="http://127.0.0.1:1", attempts=2)
    assert waited(opened) == [0.5]


@pytest.mark.parametrize("host", ["169.254.169.254", "[fd00:ec2::254]", "0.0.0.0"])
def test_metadata_services_are_no_servers(host: str, opened: Open) -> None:
    """Catches a check that reads a cloud's credentials and shows them in a message."""
    with pytest.raises(ModelError, match=r"metadata|no receiver"):
        opened(url=f"http://{host}", attempts=1)


def test_a_path_in_front_and_v1_behind_are_understood(opened: Open, server: FrontEnd) -> None:
    opened(url=f"{server.url}/v1/").ask(PROMPT)
    with pytest.raises(UnusableServerError, match="lists no models"):
        opened(url=f"{server.url}/proxy/v1")
    assert [path for path, _, _ in server.requests][-1] == "/proxy/v1/models"
