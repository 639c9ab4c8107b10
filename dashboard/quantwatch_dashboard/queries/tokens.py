"""Inside a run: prompts, token matrices, top logits, worst tokens."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import streamlit as st
from numpy.typing import NDArray

from quantwatch.domain import MODEL, RunResult
from quantwatch.store import blocks, suites
from quantwatch.store.records import StoredPrompt
from quantwatch.store.vocabularies import get_vocabulary
from quantwatch_dashboard.logic.grid import TokenGrid, TokenPlace, side_by_side
from quantwatch_dashboard.logic.nonfinite import Births, PromptBirth, births_of, prompt_birth
from quantwatch_dashboard.logic.summaries import WorstToken, worst
from quantwatch_dashboard.queries.bounded import Pool, pooled
from quantwatch_dashboard.queries.connection import LONG_S, database

_MAX_PROMPTS = 256
ESTIMATED = "lens_kl"
"""The metric that is estimated where it wasn't measured, if the check asks for that."""
_PLACE_BYTES = 160
"""What a token's place takes in memory, besides its text, which the prompt holds."""

BlockKey = tuple[str, str, str, int]
"""Run, candidate, metric, prompt."""


@st.cache_resource(max_entries=1, show_spinner=False)
def matrices() -> Pool:
    """Return the matrices of all pages together. One of 126 layers, 30,000 tokens takes 100 MB."""
    return Pool(max_bytes=256 << 20, ttl_s=LONG_S)


def _size(grid: TokenGrid | None) -> int:
    if grid is None:
        return 0
    return grid.values.nbytes + grid.missing.nbytes + _PLACE_BYTES * len(grid.places)


@st.cache_resource(ttl=LONG_S, max_entries=16, show_spinner=False)
def prompts(url: str, suite_hash: str) -> tuple[StoredPrompt, ...]:
    """Return a suite's prompts with their token pieces."""
    return tuple(suites.get_prompts(database(url), suite_hash))


@st.cache_resource(ttl=LONG_S, max_entries=32, show_spinner=False)
def block_kinds(url: str, run_id: str, candidate: str) -> frozenset[tuple[str, str, int | None]]:
    """Return (kind, metric, prompt) of every stored block of a candidate."""
    found = blocks.list_blocks(database(url), run_id, candidate)
    return frozenset((b.kind, b.metric, b.prompt) for b in found)


@pooled(matrices, _size)
def grid(url: str, key: BlockKey, suite_hash: str) -> TokenGrid | None:
    """Return one metric over taps and tokens of one prompt, None when it was not stored."""
    return _grid(url, key, suite_hash)


@st.cache_resource(ttl=LONG_S, max_entries=256, show_spinner=False)
def at_token(url: str, key: BlockKey, suite_hash: str, position: int) -> Mapping[str, float | None]:
    """Return one metric at one token by scope, None where it was not measured.

    {} when it is not stored there. The matrix is not decoded for it.
    """
    stored = _prompt(url, suite_hash, key[3])

    def column(width: int) -> int:
        return position - _offset(stored, width)

    block = blocks.get_column(database(url), *key, column)
    if block is None:
        return {}
    gone = np.zeros(block.values.shape, np.bool_) if block.missing is None else block.missing
    return {
        scope: None if gone[i, 0] else float(block.values[i, 0])
        for i, scope in enumerate(block.scopes)
    }


def _grid(url: str, key: BlockKey, suite_hash: str) -> TokenGrid | None:
    run_id, candidate, metric, prompt = key
    block = blocks.get_block(database(url), run_id, candidate, "per_token", metric, prompt)
    if block is None:
        return None
    values = block.values
    missing = np.zeros(values.shape, np.bool_) if block.missing is None else block.missing
    stored = _prompt(url, suite_hash, prompt)
    first = _offset(stored, values.shape[1])
    places = tuple(_place(stored, first + j) for j in range(values.shape[1]))
    return TokenGrid(
        tuple(block.scopes), places, values, missing, _estimated(url, key, block.scopes, missing)
    )


def _estimated(
    url: str, key: BlockKey, scopes: Sequence[str], missing: NDArray[np.bool_]
) -> NDArray[np.bool_] | None:
    """Return which cells are estimates: those whose error was not measured, where any was."""
    if key[2] != ESTIMATED:
        return None
    errors = blocks.get_block(database(url), *key[:2], "per_token", "lens_kl_error", key[3])
    if errors is None or errors.missing is None:
        return None
    known = {str(scope): row for scope, row in zip(errors.scopes, errors.missing, strict=True)}
    exact = np.zeros(missing.shape[1], np.bool_)  # of a layer without errors nothing is estimated
    estimated: NDArray[np.bool_] = np.stack([known.get(scope, exact) for scope in scopes])
    return estimated & ~missing


@pooled(matrices, _size)
def measured_tokens(
    url: str, run_id: str, candidate: str, metric: str, suite_hash: str
) -> TokenGrid | None:
    """Return one metric at all tokens of all prompts at which a tap was measured, None without."""
    measured = list(each_measured(url, (run_id, candidate, metric), suite_hash))
    return side_by_side(measured) if measured else None


def each_measured(url: str, key: tuple[str, str, str], suite_hash: str) -> Iterator[TokenGrid]:
    """Yield the same prompt by prompt; nothing of it is kept.

    The output (scope `model`) is measured everywhere and left out.
    """
    for stored in prompts(url, suite_hash)[:_MAX_PROMPTS]:
        found = _grid(url, (*key, stored.index), suite_hash)
        if found is not None:
            yield found.rows(set(found.scopes) - {MODEL}).measured_only()


@st.cache_resource(ttl=LONG_S, max_entries=16, show_spinner=False)
def births(url: str, run_id: str, candidate: str, suite_hash: str) -> tuple[PromptBirth, ...]:
    """Return where each prompt stops being finite, and in how many tokens; () where all are.

    Of a candidate that is NaN everywhere each token has a birth: they are read by prompt.
    """
    found = (
        prompt_birth(_births(url, (run_id, candidate), stored.index, suite_hash))
        for stored in prompts(url, suite_hash)[:_MAX_PROMPTS]
    )
    return tuple(birth for birth in found if birth is not None)


def _births_size(births: Births) -> int:
    return births.rows.nbytes + births.values.nbytes + _PLACE_BYTES * len(births)


@pooled(matrices, _births_size)
def births_in(url: str, key: tuple[str, str], prompt: int, suite_hash: str) -> Births:
    """Return the tokens of one prompt that are not finite, for a run and candidate."""
    return _births(url, key, prompt, suite_hash)


def _births(url: str, key: tuple[str, str], prompt: int, suite_hash: str) -> Births:
    """The relative error is not finite exactly where a tap is not; the output comes after all."""
    names = [(*key, metric, prompt) for metric in ("rel_error", "logit_kl")]
    found = (_grid(url, name, suite_hash) for name in names)
    return births_of([grid for grid in found if grid is not None])


@st.cache_resource(ttl=LONG_S, max_entries=16, show_spinner=False)
def top_logits(
    url: str, run_id: str, candidate: str, prompt: int, suite_hash: str
) -> tuple[int, NDArray[np.float64]] | None:
    """Return the first position and the top logits [5, P, K] of a prompt, None if not stored."""
    block = blocks.get_block(database(url), run_id, candidate, "topk", "logits", prompt)
    if block is None:
        return None
    return _offset(_prompt(url, suite_hash, prompt), block.values.shape[1]), block.values


@st.cache_resource(ttl=LONG_S, max_entries=32, show_spinner=False)
def worst_tokens(
    url: str, run_id: str, candidate: str, suite_hash: str, count: int = 20
) -> tuple[WorstToken, ...]:
    """Return the tokens with the largest output KL of all prompts.

    They lie in the prompts with the largest maxima, so only that many matrices are read.
    """
    totals = blocks.get_block(database(url), run_id, candidate, "per_prompt", "logit_kl", None)
    if totals is None:
        return ()
    maxima = np.nan_to_num(totals.values[:, list(totals.scopes).index(MODEL), 3], nan=np.inf)
    stored = prompts(url, suite_hash)
    picked = [stored[i].index for i in np.argsort(-maxima, kind="stable")[:count]]
    grids = [_grid(url, (run_id, candidate, "logit_kl", p), suite_hash) for p in picked]
    return worst([g for g in grids if g is not None], count)


def token_texts(url: str, result: RunResult) -> tuple[str, ...]:
    """Return the text of each token id in order, () when it isn't kept.

    A suite whose text must not be kept has none either: a model's first choices tell the prompt.
    """
    if result.reference is None or any(p.pieces is None for p in prompts(url, result.suite_hash)):
        return ()
    return _vocabulary(url, result.reference.fingerprint.tokenizer_sha)


@st.cache_resource(ttl=LONG_S, max_entries=8, show_spinner=False)
def _vocabulary(url: str, tokenizer_sha: str) -> tuple[str, ...]:
    return get_vocabulary(database(url), tokenizer_sha)


def _prompt(url: str, suite_hash: str, prompt: int) -> StoredPrompt:
    return next(p for p in prompts(url, suite_hash) if p.index == prompt)


def _offset(stored: StoredPrompt, width: int) -> int:
    """Return the position of the first column: blocks have one per token, or per scored token."""
    return 0 if width == stored.num_tokens else stored.score_start


def _place(stored: StoredPrompt, position: int) -> TokenPlace:
    piece = None if stored.pieces is None else stored.pieces[position]
    return TokenPlace(stored.index, position, stored.token_ids[position], piece)
