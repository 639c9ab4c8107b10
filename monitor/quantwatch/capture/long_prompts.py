"""Measure a prompt in chunks: every model runs on each chunk once and goes on from its own cache.

What depends on a chunk's tokens alone is measured as on any prompt. Isolated errors, and the noise
floor that needs them, are measured on the first chunk of an isolated prompt only: a module is fed
the reference's input there, and behind the first chunk its attention would have to see what it
would itself have made of the reference's earlier inputs, a second cache of every model. Nothing
later can change the first chunk's numbers, so they are what a pass over those tokens alone gives.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from quantwatch.capture.batches import Batch
from quantwatch.capture.chunks import chunks_of, goes_in_chunks
from quantwatch.capture.prefill import prefill_effect
from quantwatch.capture.probe import Probe
from quantwatch.domain import Prompt, Suite
from quantwatch.models.loaded import LoadedModel


def chunk_batches(prompt: Prompt, size: int | None, *, isolated: bool) -> Iterator[Batch]:
    """Yield a prompt's chunks as batches; isolated is the first, if any of it is scored."""
    size = len(prompt.token_ids) if size is None else size
    for chunk in chunks_of(prompt, size):
        first = isolated and chunk.is_first and chunk.piece.num_scored > 0
        yield Batch((chunk.piece,), isolated=first, chunk=chunk)


@contextmanager
def caches_dropped(probes: Iterable[Probe]) -> Iterator[None]:
    """Drop what models keep of a prompt when the body ends, however it ends."""
    kept = tuple(probes)
    try:
        yield
    finally:
        for probe in kept:
            probe.prefill = None


def first_part(prompt: Prompt, size: int | None) -> Prompt:
    """Return what of a prompt goes through first: all of it, or its first chunk."""
    if size is None or not goes_in_chunks(prompt, size):
        return prompt
    return next(chunks_of(prompt, size)).piece


def try_chunks(
    models: Mapping[str, LoadedModel], reference: str, suite: Suite, size: int | None
) -> dict[str, float]:
    """Try every model on a few tokens in chunks, if a prompt of the suite goes so.

    Return how far its logits are off, by name. Raises ModelError for one that can't go in chunks.
    """
    longest = max(suite.prompts, key=lambda prompt: len(prompt.token_ids))
    if not goes_in_chunks(longest, size):
        return {}
    return {
        name: prefill_effect(model, longest, is_reference=name == reference)
        for name, model in models.items()
    }
