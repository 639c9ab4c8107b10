"""Tables as CSV: full precision, `nan` and `inf` as words, empty where nothing was measured.

A spreadsheet takes a cell that starts with = + - @ for a formula. Text from the database that does
gets an apostrophe in front; numbers are numbers. Every cell is quoted: where lists are separated by
semicolons, one inside a token would begin a cell of its own.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

from quantwatch.domain import Measurement, RunResult
from quantwatch.metrics.registry import METRICS
from quantwatch_dashboard.logic.grid import TokenGrid, TokenPlace
from quantwatch_dashboard.logic.layer_rows import LayerRow
from quantwatch_dashboard.logic.summaries import WorstToken
from quantwatch_dashboard.logic.toplogits import TopRow

_FORMULA = frozenset("=+-@＝＋－＠")
"""East Asian versions take the wide signs for the same."""
_BREAKS = ("\t", "\r", "\n")
_STATISTICS = [f.name for f in fields(Measurement) if f.name not in ("metric", "scope")]


def safe(value: object) -> object:
    """Return a cell: text that a spreadsheet would run is quoted, numbers keep every digit."""
    if isinstance(value, str):
        # A formula may hide behind what can't be seen: some programs drop that.
        seen = next((char for char in value if char.isprintable() and char != " "), "")
        risky = seen in _FORMULA or value.lstrip(" ").startswith(_BREAKS)
        return f"'{value}" if risky else value
    if isinstance(value, float):
        return "nan" if math.isnan(value) else repr(float(value))
    return value


def file_name(name: str) -> str:
    """Return a name that every file system takes, whatever a candidate is called."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in name)
    return kept[:120] if len(kept) <= 120 else f"{kept[:100]}-{kept[-19:]}"


def table(headers: Sequence[str], rows: Iterable[Iterable[object]]) -> bytes:
    """Return rows as UTF-8 CSV with a header line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow([safe(header) for header in headers])
    writer.writerows([safe(cell) for cell in row] for row in rows)
    # Half a character, which tokens hold, is no UTF-8.
    return out.getvalue().encode("utf-8", "replace")


def layer_csv(rows: Sequence[LayerRow]) -> bytes:
    """Return the layer table."""
    names = [f.name for f in fields(LayerRow)]
    return table(names, (asdict(row).values() for row in rows))


def measurements_csv(result: RunResult) -> bytes:
    """Return every statistic of every metric, scope and candidate, with the noise floor."""
    headers = ("run", "candidate", "metric", "unit", "scope", *_STATISTICS, "noise_floor")
    rows = (
        (
            result.run_id, candidate.name, row.metric, _unit(row.metric), row.scope,
            *(getattr(row, name) for name in _STATISTICS),
            result.noise_floor.get((row.metric, row.scope)),
        )
        for candidate in result.candidates
        for row in candidate.measurements
    )  # fmt: skip
    return table(headers, rows)


def _unit(metric: str) -> str:
    return METRICS[metric].unit if metric in METRICS else ""


def matrix_csv(grid: TokenGrid) -> bytes:
    """Return one row per token and one column per scope, as it was stored."""
    values, missing = grid.values.T.tolist(), grid.missing.T.tolist()
    rows = (
        (*_place(place), *("" if gone else value for value, gone in zip(row, absent, strict=True)))
        for place, row, absent in zip(grid.places, values, missing, strict=True)
    )
    return table(("prompt", "position", "token_id", "token", *grid.scopes), rows)


def worst_csv(tokens: Sequence[WorstToken]) -> bytes:
    """Return the worst tokens with their output KL."""
    headers = ("prompt", "position", "token_id", "token", "logit_kl")
    return table(headers, ((*_place(token.place), token.value) for token in tokens))


def top_csv(rows: Sequence[TopRow], words: Sequence[str]) -> bytes:
    """Return both models' top tokens at one position."""
    headers = [f.name for f in fields(TopRow)]
    named = ((*asdict(row).values(), *(_word(i, words) for i in row.ids)) for row in rows)
    return table([*headers, "reference_token", "candidate_token"], named)


def _word(token_id: int | None, words: Sequence[str]) -> str:
    return words[token_id] if token_id is not None and 0 <= token_id < len(words) else ""


def _place(place: TokenPlace) -> tuple[int, int, int, str]:
    return place.prompt, place.position, place.token_id, place.piece or ""
