"""`quantwatch compare REF CAND`: two models on a text, without any configuration."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quantwatch.cli import options as o
from quantwatch.cli.output import Delivery
from quantwatch.cli.running import Wishes, run
from quantwatch.cli.session import Session
from quantwatch.report.repeat import COMPARE

if TYPE_CHECKING:
    from quantwatch.config.schema import CheckConfig

Values = dict[str, Any]


# Typer declares every option as a parameter: grouped by what it is about, not one a line.
def compare(
    context: typer.Context, reference: o.Reference, candidate: o.Candidate, *,
    text: o.Texts, window: o.Window = 512, limit: o.Limit = None, score_start: o.ScoreStart = 0,
    recipe: o.Recipe = None, execution: o.Executed = "dequantized",
    dtype: o.ReferenceDtype = "float32", candidate_dtype: o.CandidateDtype = None,
    threads: o.Threads = None, allow_beyond_context: o.Beyond = False,
    prefill_chunk: o.Chunk = None, reference_cache: o.Recorded = False,
    lens_products: o.Products = "float32", executor: o.Spread = "inline", shards: o.Shards = None,
    yes: o.Yes = False, store: o.Store = True, json: o.AsJson = False, format_: o.AsFormat = None,
    output: o.Output = None,
) -> None:  # fmt: skip
    """Measure where and how much CAND departs from REF."""
    session = Session.of(context, json=json)
    wishes = Wishes(Delivery(json=json, shown=format_, files=output), store, yes)
    suite: Values = {
        "files": [*map(str, text)],
        "window": window,
        "limit": limit,
        "score_start": score_start,
    }
    ours: Values = {"model": reference, "dtype": dtype}
    theirs: Values = {"model": candidate, "dtype": candidate_dtype or dtype, "recipe": recipe}
    limits: Values = {"threads": threads, "allow_beyond_context": allow_beyond_context}
    limits |= {"prefill_chunk": prefill_chunk, "reference_cache": reference_cache}
    limits |= {"lens_products": lens_products, "executor": executor, "shards": shards}
    check = comparison(ours, theirs | {"execution": execution}, suite, limits)
    run(session, COMPARE, check, Path.cwd(), wishes)


def comparison(
    reference: Values, candidate: Values, suite: Values, limits: Values
) -> "CheckConfig":
    """Return the check that a comparison is. Raises ConfigError on values that don't fit."""
    from quantwatch.config.load import parse
    from quantwatch.config.schema import CheckConfig

    named = candidate | {"name": candidate_name(candidate["model"], candidate["recipe"])}
    models = {"reference": reference, "candidates": [named]}
    return parse(CheckConfig, {**models, "suite": suite, **limits}, COMPARE)


def candidate_name(model: str, recipe: str | None) -> str:
    """Return a name for CAND: its last path component without .gguf, and the recipe."""
    stem = re.sub(r"\.gguf$", "", Path(model).name or Path(model).resolve().name)
    words = [stem] if recipe is None else [stem, recipe]
    clean = re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(words)).lstrip("_.-")[:64]
    # The reference's own noise floor is stored under the name `reference`.
    return "candidate" if clean in ("", "reference") else clean
