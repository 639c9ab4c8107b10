"""What a run will take, told before it starts: figures labelled as estimates, from headers only."""

import time
from dataclasses import dataclass

import psutil
import torch

from quantwatch.capture.chunks import goes_in_chunks
from quantwatch.config.schema import VariantConfig
from quantwatch.domain import Suite
from quantwatch.errors import UserError
from quantwatch.models.declared import DeclaredSizes
from quantwatch.models.estimate import estimate_bytes
from quantwatch.models.lookup import look_up
from quantwatch.models.text import load_text_side
from quantwatch.pipeline.executors.sharding import sharding_of
from quantwatch.pipeline.request import RunRequest
from quantwatch.prompts.files import read_files
from quantwatch.prompts.loading import load_suite

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WORKING_BYTES = 400 << 20
"""Memory promised above the loaded models (docs/performance.md)."""
_OVERHEAD = 1.6
"""What a check with default settings costs beside bare forward passes (docs/performance.md)."""
_MASK_BYTES = 5
"""Attention's mask per token of a chunk and token that it sees (docs/performance.md)."""
_ISOLATED_MORE = 0.7
"""What is recorded more where errors are isolated, against the taps alone (docs/performance.md)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated, not measured. None where nothing can be said without loading or downloading."""

    memory_bytes: int | None
    free_bytes: int
    num_tokens: int | None
    seconds: float | None
    recorded_bytes: int | None = None
    """Disk that the reference takes, unless it is recorded already, which makes the run shorter;
    None where none is recorded, or that can't be told."""
    more_caches: bool = False
    """Whether KV caches of prompts in chunks come on top of the memory: their size isn't known."""


@dataclass(frozen=True, slots=True)
class _Texts:
    suite: Suite
    sizes: DeclaredSizes | None


@dataclass(frozen=True, slots=True)
class _Size:
    num_bytes: int
    num_weights: int
    width: int = 0
    """Bytes of one computed value, 0 where nothing is computed here."""


def look_up_named(request: RunRequest) -> None:
    """Find the texts, models and recipes that a check names. Raises UserError if one isn't there.

    A run whose words are mistyped never began: asked before it is stored, it leaves no failed run.
    """
    read_files(request.suite.files, request.base_dir)
    for config in (request.check.reference, *request.check.candidates):
        look_up(config, request.base_dir)


def estimate(request: RunRequest) -> Estimate:
    """Return what a run will take. Reads headers and the tokenizer, never the weights.

    Raises UserError when the check names something that is missing or corrupt. A candidate that
    can't be loaded costs nothing and spoils no other: the error is raised when none is left.
    """
    sizes = {"": _size(request.check.reference, request)}
    failures: list[UserError] = []
    for config in request.check.candidates:
        try:
            sizes[config.name] = _size(config, request)
        except UserError as error:
            failures.append(error)
    if len(failures) == len(request.check.candidates):
        raise failures[0]
    known = [size for size in sizes.values() if size is not None]
    texts = _texts(request)
    tokens = None if texts is None else texts.suite.num_tokens
    free = psutil.virtual_memory().available
    if len(known) < len(sizes):
        return Estimate(None, free, tokens, None)
    seconds = None
    if tokens is not None and request.check.lens == "sampled":  # else as the vocabulary is wide
        weights = sum(size.num_weights for size in known)
        seconds = _OVERHEAD * 2 * weights * tokens / _flops_per_second(request.check.threads)
    workers, caches = _workers_here(request), _cache_bytes(request, texts, known)
    # Workers have the models once more each; the run's own process computes nothing then.
    copies, at_work = 1 + workers, max(1, workers)
    models = sum(size.num_bytes for size in known)
    memory = copies * models + at_work * (_WORKING_BYTES + (caches or 0))
    if seconds is not None:
        seconds /= at_work
    recorded = _recorded_bytes(request, texts)
    return Estimate(memory, free, tokens, seconds, recorded, more_caches=caches is None)


def _workers_here(request: RunRequest) -> int:
    """Return how many processes of this machine measure beside the run's own."""
    sharding = sharding_of(request.check)
    return 0 if sharding is None or not sharding.is_here else sharding.num_shards or 1


def _size(config: VariantConfig, request: RunRequest) -> _Size | None:
    if config.served is not None:  # somebody else's memory and arithmetic
        return _Size(0, 0)
    found = estimate_bytes(config, request.base_dir)
    if found is None:
        return None
    num_bytes = found.streamed if request.check.memory == "streamed" else found.resident
    return _Size(num_bytes, found.resident // _width(config), _width(config))


def _width(config: VariantConfig) -> int:
    return _BYTES[config.loading_dtype]


def _texts(request: RunRequest) -> _Texts | None:
    """Tokenize the suite with the reference's tokenizer, if that can be had without the weights."""
    known = load_text_side(
        request.check.reference, base_dir=request.base_dir, cache_dir=request.cache_dir
    )
    if known is None:
        return None
    suite = load_suite(
        request.suite,
        known.tokenizer,
        base_dir=request.base_dir,
        max_positions=known.max_positions,
        allow_beyond_context=request.check.allow_beyond_context,
    )
    return _Texts(suite, known.sizes)


def _cache_bytes(request: RunRequest, texts: _Texts | None, models: list[_Size]) -> int | None:
    """Return what the longest prompt in chunks takes: all models' KV caches and a mask.

    None where it can't be told.
    """
    chunk = request.check.prefill_chunk
    if chunk is None:
        return 0
    if texts is None:
        return None
    longest = max(len(prompt.token_ids) for prompt in texts.suite.prompts)
    if longest <= chunk:
        return 0
    if texts.sizes is None:
        return None
    per_token = texts.sizes.cached_values * sum(model.width for model in models)
    return longest * (per_token + _MASK_BYTES * chunk)


def _recorded_bytes(request: RunRequest, texts: _Texts | None) -> int | None:
    """Return what is recorded of the reference: prompts in chunks aren't."""
    check = request.check
    if not check.reference_cache or texts is None or texts.sizes is None:
        return None
    per_token = texts.sizes.recorded_values * _width(check.reference)
    whole = (p for p in texts.suite.prompts if not goes_in_chunks(p, check.prefill_chunk))
    tokens = sum(len(prompt.token_ids) for prompt in whole)
    return round(tokens * per_token * (1 + _ISOLATED_MORE * check.isolated_fraction))


def _flops_per_second(threads: int | None) -> float:
    """Time one matrix product of a small model's shape; 2·n³ operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        a, b = torch.ones(256, 768), torch.ones(768, 768)
        a @ b
        start = time.perf_counter()
        for _ in range(8):
            a @ b
        return 8 * 2 * 256 * 768 * 768 / (time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
