"""Measure a prompt in chunks: every model runs on each chunk once and goes on from its own cache.

What depends on a chunk's tokens alone is measured as on any prompt. Isolated errors, and the noise
floor that needs them, are measured on the first chunk of an isolated prompt only: a module is fed
the reference's input there, and behind the first chunk its attention would have to see what it
would itself have made of the reference's earlier inputs, a second cache of every model. Nothing
later can change the first chunk's numbers, so they are what a pass over those tokens alone gives.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from quantwatch.capture.chunks import goes_in_chunks
from quantwatch.capture.prefill import prefill_effect
from quantwatch.capture.probe import Probe
from quantwatch.domain import Suite
from quantwatch.models.loaded import LoadedModel


@contextmanager
def caches_dropped(probes: Iterable[Probe]) -> Iterator[None]:
    """Drop what models keep of a prompt when the body ends, however it ends."""
    kept = tuple(probes)
    try:
        yield
    finally:
        drop_caches(kept)


def drop_caches(probes: Iterable[Probe]) -> None:
    """Drop what models keep of a prompt."""
    for probe in probes:
        probe.prefill = None


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
