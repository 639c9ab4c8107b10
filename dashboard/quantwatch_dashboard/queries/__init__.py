"""Every read of the database, one module per subject. Only these and `actions` know the store."""

from quantwatch_dashboard.queries.connection import program, shown_url, url
from quantwatch_dashboard.queries.overview import checks, faults, running, with_trends
from quantwatch_dashboard.queries.runs import (
    alerts_of,
    attempts,
    baseline,
    progress,
    recent_runs,
    resolve,
    result,
)
from quantwatch_dashboard.queries.tokens import (
    BlockKey,
    at_token,
    births,
    births_in,
    block_kinds,
    each_measured,
    grid,
    measured_tokens,
    prompts,
    token_texts,
    top_logits,
    worst_tokens,
)

__all__ = [
    "BlockKey",
    "alerts_of",
    "at_token",
    "attempts",
    "baseline",
    "births",
    "births_in",
    "block_kinds",
    "checks",
    "each_measured",
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
    "with_trends",
    "worst_tokens",
]
