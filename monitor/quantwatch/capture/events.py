"""What a model's kernels and residual stream did that nobody asked for, in words with counts.

Right but slow, done by another back end than the named one, or beyond what a narrow stream can
hold: the figures alone don't show it. Counted are the forward passes under observation and the
heads that are read off, of one model only; what runs again for an isolated error is not.
"""

from collections.abc import Iterator, Mapping

from quantwatch.config.lens import Products
from quantwatch.domain import Scope
from quantwatch.models.quiet import shorten
from quantwatch_kernels.registry import Watch

_OFF_BY = {"bfloat16": "half a percent", "int16": "a seventieth of a percent"}


def event_words(watch: Watch, overflows: Mapping[str, int]) -> tuple[str, ...]:
    """Return one sentence per kind of event, the most frequent first; none when all went well.

    `overflows` maps scopes to values that became infinite.
    """
    return (*_slow(watch), *_fallbacks(watch), *_overflows(overflows))


def chunk_words(count: int, *, estimated: bool = False) -> tuple[str, ...]:
    """Say that so many prompts went in chunks, and what of them is measured on a part only."""
    if not count:
        return ()
    partly = "isolated errors and the noise floor are of the first chunk alone"
    partly += ", and no layer is estimated there" if estimated else ""
    return (f"{_times(count, 'prompt')} went through in chunks: {partly}",)


def products_words(products: Products) -> tuple[str, ...]:
    """Say that the lens rounded what it multiplied, where it was asked to."""
    if products == "float32":
        return ()
    return (
        f'lens_products = "{products}": per-layer KL and top-k deviations are of rounded factors; '
        f"a token's KL is off by {_OFF_BY[products]} in the median, as measured on SmolLM2-135M "
        "(docs/performance.md)",
    )


def unrouted_words(unrouted: Mapping[Scope, Mapping[str, str]], name: str) -> tuple[str, ...]:
    """Return one sentence per reason why routers of a candidate aren't compared, with the layers.

    `unrouted` maps layers to models to reasons; what the reference has goes first.
    """
    found: dict[str, list[str]] = {}
    for scope, reasons in unrouted.items():
        for model in ("reference", name):
            if model in reasons:
                found.setdefault(f"{model}: {reasons[model]}", []).append(str(scope))
    return tuple(
        f"routing is not compared at {shorten(places)} ({why})" for why, places in found.items()
    )


def _slow(watch: Watch) -> Iterator[str]:
    for slow, count in watch.slow.most_common():
        yield f"{slow.op} ({slow.backend}), {_times(count, 'call')}: {slow.reason}"


def _fallbacks(watch: Watch) -> Iterator[str]:
    for fallback, count in watch.fallbacks.most_common():
        instead = f"{fallback.used} instead of {fallback.wanted}"
        yield f"{fallback.op} ({instead}), {_times(count, 'time')}: {fallback.reason}"


def _overflows(overflows: Mapping[str, int]) -> Iterator[str]:
    places = [f"{scope}, {_times(count, 'value')}" for scope, count in overflows.items()]
    if places:
        yield f"the residual stream became infinite in its dtype: {shorten(places)}"


def _times(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
