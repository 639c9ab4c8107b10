"""Every read of the database, one module per subject. Only these and `actions` know the store."""

from quantwatch_dashboard.queries.connection import program, shown_url, url
from quantwatch_dashboard.queries.overview import checks, faults, running
from quantwatch_dashboard.queries.runs import (
    attempts,
    baseline,
    progress,
    recent_runs,
    resolve,
    result,
)
from quantwatch_dashboard.queries.tokens import (
    BlockKey,
    births,
    block_kinds,
    grid,
    measured_tokens,
    prompts,
    token_texts,
    top_logits,
    worst_tokens,
)

__all__ = [
    "BlockKey",
    "attempts",
    "baseline",
    "births",
    "block_kinds",
    "checks",
    "faults",
    "grid",
    "measured_tokens",
    "program",
    "progress",
    "prompts",
    "recent_runs",
    "resolve",
    "result",
    "running",
    "shown_url",
    "token_texts",
    "top_logits",
    "url",
    "worst_tokens",
]
