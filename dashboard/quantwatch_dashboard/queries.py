"""Every read of the database. The only module of the dashboard that knows the store.

The engine is cached per URL and shared, sessions never are. Records are frozen, so they are cached
as shared objects, without a copy per rerun; every cache forgets by time and by number.
"""

import os
import shlex

import numpy as np
import streamlit as st
from numpy.typing import NDArray
from sqlalchemy import select

from quantwatch.config.load import database_url
from quantwatch.domain import MODEL, RunResult, Verdict
from quantwatch.errors import UserError
from quantwatch.store import blocks, runs, suites
from quantwatch.store.records import RunSummary, StoredPrompt
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import CheckRow
from quantwatch.store.urls import parse_url, shown
from quantwatch.store.vocabularies import get_vocabulary
from quantwatch_dashboard import series
from quantwatch_dashboard.charts.grid import TokenGrid, TokenPlace, side_by_side
from quantwatch_dashboard.summaries import CheckSummary, WorstToken, summarize, worst

_SHORT_S, _LONG_S = 5, 60
_RUNS_PER_CHECK = 60
_TREND_RUNS = 30
_MAX_PROMPTS = 256
_MAX_FAULTS = 10

BlockKey = tuple[str, str, str, int]
"""Run, candidate, metric, prompt."""


def url() -> str:
    """Return the database that this process watches: QUANTWATCH_DATABASE_URL or the default."""
    return database_url(None, os.environ)


def shown_url(given: str) -> str:
    """Return a URL for people: without its password."""
    try:
        return shown(parse_url(given))
    except UserError as error:
        return str(error)


def program() -> str:
    """Return how a command line starts that uses this database, without its password."""
    given = url()
    own = given == database_url(None, {})
    return "quantwatch" if own else f"quantwatch --database {shlex.quote(shown_url(given))}"


@st.cache_resource(max_entries=8, show_spinner=False, on_release=lambda db: db.close())
def _database(given: str) -> Database:
    return open_database(given, read_only=True)


@st.cache_resource(ttl=_SHORT_S, max_entries=4, show_spinner=False)
def checks(given: str) -> tuple[CheckSummary, ...]:
    """Return one summary per check, worst first; also of those that never came to an end."""
    db = _database(given)
    with db.reader() as session:
        names = session.scalars(select(CheckRow.name)).all()
    found = [summary for name in names if (summary := _check(db, name)) is not None]
    return tuple(sorted(found, key=lambda summary: summary.order))


@st.cache_resource(ttl=_SHORT_S * 3, max_entries=4, show_spinner=False)
def faults(given: str) -> dict[str, str]:
    """Return, of the checks with a regression (the first ten), the candidate and where it broke."""
    broken = [c.decided for c in checks(given) if c.decided is not None]
    worst = [run for run in broken if run.verdict == Verdict.REGRESSION][:_MAX_FAULTS]
    return {run.check: _fault(result(given, run.run_id)) for run in worst}


def _fault(found: RunResult) -> str:
    lead = series.leading(found)
    return f"{lead.name}: {series.fault(found, lead)}" if lead is not None else ""


def _check(db: Database, check: str) -> CheckSummary | None:
    recent = runs.list_runs(db, check=check, limit=_RUNS_PER_CHECK)
    if not recent:
        return None
    points = runs.get_series(db, check, "logit_kl", limit=_TREND_RUNS)
    return summarize(check, recent, points, max_runs=_TREND_RUNS)


@st.cache_resource(ttl=_SHORT_S, max_entries=64, show_spinner=False)
def recent_runs(given: str, check: str | None = None, limit: int = 25) -> tuple[RunSummary, ...]:
    """Return the newest runs, of one check or of all."""
    return tuple(runs.list_runs(_database(given), check=check, limit=limit))


@st.cache_resource(ttl=_SHORT_S, max_entries=64, show_spinner=False)
def resolve(given: str, named: str) -> str:
    """Return the id of the run that was named. Raises UserError when there is none."""
    return runs.resolve_run_id(_database(given), named)


@st.cache_resource(ttl=_SHORT_S * 3, max_entries=32, show_spinner=False)
def result(given: str, run_id: str) -> RunResult:
    """Return a run with all its measurements. Raises UserError when there is none."""
    return runs.get_result(_database(given), run_id)


@st.cache_resource(ttl=_LONG_S, max_entries=16, show_spinner=False)
def prompts(given: str, suite_hash: str) -> tuple[StoredPrompt, ...]:
    """Return a suite's prompts with their token pieces."""
    return tuple(suites.get_prompts(_database(given), suite_hash))


@st.cache_resource(ttl=_LONG_S, max_entries=32, show_spinner=False)
def block_kinds(given: str, run_id: str, candidate: str) -> frozenset[tuple[str, str, int | None]]:
    """Return (kind, metric, prompt) of every stored block of a candidate."""
    found = blocks.list_blocks(_database(given), run_id, candidate)
    return frozenset((b.kind, b.metric, b.prompt) for b in found)


@st.cache_resource(ttl=_LONG_S, max_entries=256, show_spinner=False)
def grid(given: str, key: BlockKey, suite_hash: str) -> TokenGrid | None:
    """Return one metric over taps and tokens of one prompt, None when it was not stored."""
    run_id, candidate, metric, prompt = key
    block = blocks.get_block(_database(given), run_id, candidate, "per_token", metric, prompt)
    if block is None:
        return None
    values = block.values
    missing = np.zeros(values.shape, np.bool_) if block.missing is None else block.missing
    stored = _prompt(given, suite_hash, prompt)
    first = _offset(stored, values.shape[1])
    places = tuple(_place(stored, first + j) for j in range(values.shape[1]))
    return TokenGrid(tuple(block.scopes), places, values, missing)


@st.cache_resource(ttl=_LONG_S, max_entries=16, show_spinner=False)
def measured_tokens(
    given: str, run_id: str, candidate: str, metric: str, suite_hash: str
) -> TokenGrid | None:
    """Return one metric at all tokens of all prompts at which a tap was measured, None without any.

    The output (scope `model`) is measured everywhere and left out.
    """
    keys = [(run_id, candidate, metric, p.index) for p in prompts(given, suite_hash)]
    found = [grid(given, key, suite_hash) for key in keys[:_MAX_PROMPTS]]
    measured = [g.rows(set(g.scopes) - {MODEL}).measured_only() for g in found if g is not None]
    return side_by_side(measured) if measured else None


@st.cache_resource(ttl=_LONG_S, max_entries=16, show_spinner=False)
def top_logits(
    given: str, run_id: str, candidate: str, prompt: int, suite_hash: str
) -> tuple[int, NDArray[np.float64]] | None:
    """Return the first position and the top logits [5, P, K] of a prompt, None if not stored."""
    block = blocks.get_block(_database(given), run_id, candidate, "topk", "logits", prompt)
    if block is None:
        return None
    return _offset(_prompt(given, suite_hash, prompt), block.values.shape[1]), block.values


@st.cache_resource(ttl=_LONG_S, max_entries=32, show_spinner=False)
def worst_tokens(
    given: str, run_id: str, candidate: str, suite_hash: str, count: int = 20
) -> tuple[WorstToken, ...]:
    """Return the tokens with the largest output KL of all prompts.

    They lie in the prompts with the largest maxima, so only that many matrices are read.
    """
    totals = blocks.get_block(_database(given), run_id, candidate, "per_prompt", "logit_kl", None)
    if totals is None:
        return ()
    maxima = np.nan_to_num(totals.values[:, list(totals.scopes).index(MODEL), 3], nan=np.inf)
    stored = prompts(given, suite_hash)
    picked = [stored[i].index for i in np.argsort(-maxima, kind="stable")[:count]]
    grids = [grid(given, (run_id, candidate, "logit_kl", p), suite_hash) for p in picked]
    return worst([g for g in grids if g is not None], count)


def token_texts(given: str, result: RunResult) -> tuple[str, ...]:
    """Return the text of each token id in order, () when it isn't kept.

    A suite whose text must not be kept has none either: a model's first choices tell the prompt.
    """
    if result.reference is None or any(p.pieces is None for p in prompts(given, result.suite_hash)):
        return ()
    return _vocabulary(given, result.reference.fingerprint.tokenizer_sha)


@st.cache_resource(ttl=_LONG_S, max_entries=8, show_spinner=False)
def _vocabulary(given: str, tokenizer_sha: str) -> tuple[str, ...]:
    return get_vocabulary(_database(given), tokenizer_sha)


def _prompt(given: str, suite_hash: str, prompt: int) -> StoredPrompt:
    return next(p for p in prompts(given, suite_hash) if p.index == prompt)


def _offset(stored: StoredPrompt, width: int) -> int:
    """Return the position of the first column: blocks have one per token, or per scored token."""
    return 0 if width == stored.num_tokens else stored.score_start


def _place(stored: StoredPrompt, position: int) -> TokenPlace:
    piece = None if stored.pieces is None else stored.pieces[position]
    return TokenPlace(stored.index, position, stored.token_ids[position], piece)
