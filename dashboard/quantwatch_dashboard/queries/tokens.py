"""Inside a run: prompts, token matrices, top logits, worst tokens."""

import numpy as np
import streamlit as st
from numpy.typing import NDArray

from quantwatch.domain import MODEL, RunResult
from quantwatch.store import blocks, suites
from quantwatch.store.records import StoredPrompt
from quantwatch.store.vocabularies import get_vocabulary
from quantwatch_dashboard.logic.grid import TokenGrid, TokenPlace, side_by_side
from quantwatch_dashboard.logic.nonfinite import Birth, births_of
from quantwatch_dashboard.logic.summaries import WorstToken, worst
from quantwatch_dashboard.queries.connection import LONG_S, database

_MAX_PROMPTS = 256

BlockKey = tuple[str, str, str, int]
"""Run, candidate, metric, prompt."""


@st.cache_resource(ttl=LONG_S, max_entries=16, show_spinner=False)
def prompts(url: str, suite_hash: str) -> tuple[StoredPrompt, ...]:
    """Return a suite's prompts with their token pieces."""
    return tuple(suites.get_prompts(database(url), suite_hash))


@st.cache_resource(ttl=LONG_S, max_entries=32, show_spinner=False)
def block_kinds(url: str, run_id: str, candidate: str) -> frozenset[tuple[str, str, int | None]]:
    """Return (kind, metric, prompt) of every stored block of a candidate."""
    found = blocks.list_blocks(database(url), run_id, candidate)
    return frozenset((b.kind, b.metric, b.prompt) for b in found)


@st.cache_resource(ttl=LONG_S, max_entries=16, show_spinner=False)
def grid(url: str, key: BlockKey, suite_hash: str) -> TokenGrid | None:
    """Return one metric over taps and tokens of one prompt, None when it was not stored.

    Few are kept: of a prompt with 30,000 tokens one takes 25 MB.
    """
    return _grid(url, key, suite_hash)


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
    return TokenGrid(tuple(block.scopes), places, values, missing)


@st.cache_resource(ttl=LONG_S, max_entries=16, show_spinner=False)
def measured_tokens(
    url: str, run_id: str, candidate: str, metric: str, suite_hash: str
) -> TokenGrid | None:
    """Return one metric at all tokens of all prompts at which a tap was measured, None without any.

    The output (scope `model`) is measured everywhere and left out.
    """
    keys = [(run_id, candidate, metric, p.index) for p in prompts(url, suite_hash)]
    found = (_grid(url, key, suite_hash) for key in keys[:_MAX_PROMPTS])
    measured = [g.rows(set(g.scopes) - {MODEL}).measured_only() for g in found if g is not None]
    return side_by_side(measured) if measured else None


@st.cache_resource(ttl=LONG_S, max_entries=16, show_spinner=False)
def births(url: str, run_id: str, candidate: str, suite_hash: str) -> tuple[Birth, ...]:
    """Return where non-finite values are born in each prompt, for a candidate that has any.

    The relative error is not finite exactly where a tap is not; the output comes after all taps.
    """
    found: list[Birth] = []
    for stored in prompts(url, suite_hash)[:_MAX_PROMPTS]:
        taps = _grid(url, (run_id, candidate, "rel_error", stored.index), suite_hash)
        output = _grid(url, (run_id, candidate, "logit_kl", stored.index), suite_hash)
        found += births_of([g for g in (taps, output) if g is not None])
    return tuple(found)


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
