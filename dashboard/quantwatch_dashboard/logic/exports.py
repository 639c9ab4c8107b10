"""Tables as CSV: full precision, `nan` and `inf` as words, empty where nothing was measured.

A spreadsheet takes a cell that starts with = + - @ for a formula. Text from the database that does
gets an apostrophe in front; numbers are numbers. Every cell is quoted: where lists are separated by
semicolons, one inside a token would begin a cell of its own.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields

from quantwatch.domain import Measurement, RunResult
from quantwatch.metrics.registry import METRICS, ROUTER_METRICS
from quantwatch_dashboard.logic.grid import TokenGrid, TokenPlace
from quantwatch_dashboard.logic.layer_rows import LayerRow
from quantwatch_dashboard.logic.summaries import WorstToken
from quantwatch_dashboard.logic.toplogits import TopRow

_FORMULA = frozenset("=+-@＝＋－＠")
"""East Asian versions take the wide signs for the same."""
MOST_CELLS = 2_000_000
"""Of one file: 50 MB of text. A spreadsheet opens no more, and the server keeps it in memory."""
_AT_ONCE = 256
"""Tokens that are turned into objects at a time."""
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
    # Half a character, which tokens hold, is no UTF-8.
    data = io.BytesIO()
    out = io.TextIOWrapper(data, "utf-8", "replace", newline="")
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow([safe(header) for header in headers])
    writer.writerows([safe(cell) for cell in row] for row in rows)
    out.flush()
    return data.getvalue()


def layer_csv(rows: Sequence[LayerRow]) -> bytes:
    """Return the layer table."""
    names = [f.name for f in fields(LayerRow) if f.name != "routers"]
    shown = (
        [getattr(row, n) for n in names] + [row.value(m) for m in ROUTER_METRICS] for row in rows
    )
    return table([*names, *ROUTER_METRICS], shown)


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


def matrix_csv(grids: Iterable[TokenGrid]) -> bytes:
    """Return one row per token and one column per scope, as it was stored.

    Of several grids as many as have at most `MOST_CELLS` cells together; the first one always.
    Raises ValueError when their scopes differ.
    """
    rest = iter(grids)
    first = next(rest, None)
    if first is None:
        return b""
    rows = (row for grid in _fitting(first, rest) for row in _rows(grid))
    return table(("prompt", "position", "token_id", "token", *first.scopes), rows)


def _fitting(first: TokenGrid, rest: Iterable[TokenGrid]) -> Iterator[TokenGrid]:
    yield first
    cells = first.values.size
    for grid in rest:
        if grid.scopes != first.scopes:
            raise ValueError("only grids of the same scopes can be in one table")
        cells += grid.values.size
        if cells > MOST_CELLS:
            return
        yield grid


def _rows(grid: TokenGrid) -> Iterator[tuple[object, ...]]:
    """Yield a grid's rows. In slices: as objects the cells of all tokens take ten times as much."""
    for at in range(0, len(grid.places), _AT_ONCE):
        part = slice(at, at + _AT_ONCE)
        values, missing = grid.values[:, part].T.tolist(), grid.missing[:, part].T.tolist()
        for place, row, absent in zip(grid.places[part], values, missing, strict=True):
            cells = ("" if gone else value for value, gone in zip(row, absent, strict=True))
            yield (*_place(place), *cells)


def around(grid: TokenGrid, position: int) -> TokenGrid:
    """Return as many tokens around a position as fit into one file."""
    most = max(1, MOST_CELLS // max(1, len(grid.scopes)))
    if len(grid.places) <= most:
        return grid
    at = sum(place.position < position for place in grid.places)
    first = min(max(0, at - most // 2), len(grid.places) - most)
    return grid.between(grid.places[first].position, grid.places[first + most - 1].position)


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
