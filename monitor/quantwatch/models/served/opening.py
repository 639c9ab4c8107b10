"""From a candidate's `served` table to a server that is known, and can be asked."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from quantwatch.config.secrets import from_environment
from quantwatch.config.served import ServedConfig
from quantwatch.config.variants import VariantConfig
from quantwatch.domain import Fingerprint, Json, Suite, Variant
from quantwatch.errors import ConfigError, IncompatibleError
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.served.dialect import Dialect, Said
from quantwatch.models.served.http import JsonClient, Sleep
from quantwatch.models.served.llamacpp import Llamacpp
from quantwatch.models.served.model import ServedModel, Terms
from quantwatch.models.served.openai import Openai
from quantwatch.models.served.sglang import Sglang
from quantwatch.models.served.trouble import NoAnswerError, UnusableServerError
from quantwatch.models.served.vllm import Vllm
from quantwatch.telemetry import canonical_sha

DIALECTS: Mapping[str, Callable[[], Dialect]] = {
    "vllm": Vllm,
    "sglang": Sglang,
    "llamacpp": Llamacpp,
    "openai": Openai,
}
EXECUTION = "served"
_WIDER = 2
"""How much wider a vocabulary may be than the reference's where the server doesn't say."""
NOT_MEASURABLE = "not measurable: served"


def open_served(
    name: str,
    config: VariantConfig,
    reference: LoadedModel,
    suite: Suite,
    *,
    env: Mapping[str, str] = os.environ,
    sleep: Sleep = time.sleep,
) -> ServedModel:
    """Ask a server who it is, and refuse what can't be compared with the reference on the suite.

    Raises:
        ConfigError: the variable with its token is not set.
        ModelError: it can't be reached, has no such model, or too short a context.
        IncompatibleError: its vocabulary is smaller than the reference's.
    """
    served = config.served
    assert served is not None
    token = None
    if served.token_env is not None:
        setting = f"candidate {name}: served.token_env"
        token = from_environment(setting, served.token_env, env)
        if not (token.reveal().isascii() and token.reveal().isprintable()):
            raise ConfigError(
                f"{setting}: {served.token_env} has characters that no header can carry; a token "
                "is printable ASCII"
            )
    client = JsonClient(
        served.base, token, timeout_s=served.timeout_s, attempts=served.attempts, sleep=sleep
    )
    dialect = DIALECTS[served.api]()
    try:
        said = dialect.identify(client, served.model)
    except NoAnswerError as error:
        raise UnusableServerError(f"{served.base.host} can't be reached: {error}") from error
    _check(said, reference, suite)
    variant = _variant(name, config, said, dialect)
    dtype, most_ids = getattr(torch, config.loading_dtype), _most_ids(said, reference)
    terms = Terms(served.top_k, dtype, suite.vocabulary, most_ids)
    return ServedModel(variant, said, dialect, client, terms)


def _check(said: Said, reference: LoadedModel, suite: Suite) -> None:
    needed = reference.num_tokens or 0
    if said.num_tokens is not None and said.num_tokens < needed:
        raise IncompatibleError(
            f"a narrower vocabulary: the reference has {needed} token ids, the server "
            f"{said.num_tokens}"
        )
    longest = max(suite.prompts, key=lambda prompt: len(prompt.token_ids))
    length = len(longest.token_ids)
    # It generates one token behind the prompt.
    if said.context is not None and length + 1 > said.context:
        raise UnusableServerError(
            f"its context of {said.context} tokens is too short for prompt {longest.index} "
            f"({length} tokens, and one that it generates)"
        )


def _most_ids(said: Said, reference: LoadedModel) -> int | None:
    """Return how many ids the server has at most; one that doesn't say may have added some."""
    if said.num_tokens is not None or reference.num_tokens is None:
        return said.num_tokens
    return _WIDER * reference.num_tokens


def _variant(name: str, config: VariantConfig, said: Said, dialect: Dialect) -> Variant:
    served = config.served
    assert served is not None
    bits = None
    if said.num_bytes is not None and said.num_weights is not None:
        bits = 8 * said.num_bytes / said.num_weights
    return Variant(
        name=name,
        fingerprint=Fingerprint(
            weights_sha="",
            config_sha=canonical_sha(dict(said.facts)),
            tokenizer_sha="",
            recipe_sha="",
            serve_sha=canonical_sha(_settings(served, said, config)),
            fault_sha="",
        ),
        execution=EXECUTION,
        size_bytes=said.num_bytes,
        bits_per_weight=bits,
        source=_source(served, said, config),
        notes=tuple(_notes(served, said, dialect)),
    )


def _settings(served: ServedConfig, said: Said, config: VariantConfig) -> Json:
    """Return what decides which numbers come back: where it is, how and what it is asked."""
    return {
        "url": str(served.base),
        "api": served.api,
        "model": said.model,
        "top_k": served.top_k,
        "dtype": config.loading_dtype,
    }


def _source(served: ServedConfig, said: Said, config: VariantConfig) -> dict[str, Any]:
    return {
        "kind": "served",
        "model": said.model,
        "served": _settings(served, said, config),
        "said": dict(said.facts),
    }


def _notes(served: ServedConfig, said: Said, dialect: Dialect) -> Iterator[str]:
    told = ", ".join(f"{name} {value}" for name, value in said.facts.items() if name != "id")
    yield (
        f"served at {served.base.netloc.decode('ascii')} as {said.model} ({served.api}); it says "
        f"of itself: {told or 'nothing more'}; its weights are unknown"
    )
    yield f"layers, lens and isolated errors, output KL over the whole vocabulary: {NOT_MEASURABLE}"
    if not dialect.always_tells_target:
        yield f"the next token is told only where it is among the {served.top_k} likeliest"
    if served.api == "openai":
        yield "it tells texts: those that stand for several token ids count as the rest"
