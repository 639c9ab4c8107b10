"""`quantwatch kernels bounds`: which layers are looked at, and the table of what was found."""

from collections.abc import Sequence
from pathlib import Path

from quantwatch.kernel_lab.bounds import RECIPES, BoundRow, check_bounds
from quantwatch.kernel_lab.inputs import fed_layers
from quantwatch.kernel_lab.references import load_reference
from quantwatch.kernel_lab.tables.model import Cell, Column, Table
from quantwatch.kernel_lab.texts import measured_text
from quantwatch_kernels.quantize.recipe import Recipe

_TOKENS = 128
_QUICK_LAYERS = 6


def bounds_of(
    model: str, cache_dir: Path, recipes: Sequence[str] | None, *, quick: bool = False
) -> list[BoundRow]:
    """Hold bounds against a model's linear layers, off its grid, fed with 128 tokens of core-v1.

    `quick` takes every sixth decoder layer. Raises ValueError for an unknown recipe, or a model
    that can't be taken off its grid.
    """
    for name in recipes or ():
        Recipe.named(name)  # a wrong name is known before a model is loaded
    loaded = load_reference(model, cache_dir)
    ids = measured_text(loaded.tokenizer).windows[0][:, :_TOKENS]
    kept = range(0, loaded.anatomy.num_layers, _QUICK_LAYERS if quick else 1)
    prefixes = tuple(f"layers.{index}." for index in kept)
    linears = {
        str(scope): path
        for scope, path in loaded.anatomy.linears.items()
        if str(scope).startswith(prefixes)
    }
    layers = fed_layers(loaded.module, linears, ids)
    return list(check_bounds(layers, recipes or RECIPES))


def summary(rows: Sequence[BoundRow]) -> Table:
    """Return one row per format and kind of layer, the worst of its layers."""
    columns = (
        Column("format", "format"),
        Column("kind", "layers"),
        Column("num_layers", "number"),
        Column("violations", "worst case exceeded"),
        Column("weight_worst", "weight error ÷ worst case", ".3f"),
        Column("dot_worst", "dot error ÷ worst case", ".3f"),
        Column("expected_low", "p99.9 ÷ expected, least", ".2f"),
        Column("expected_high", "most", ".2f"),
        Column("sqnr_db", "SQNR, dB, mean", ".2f"),
        Column("sqnr_gap_db", "largest gap to predicted, dB", ".3f"),
        Column("sum_worst", "float32 sums ÷ γ bound", ".4f"),
    )
    groups: dict[tuple[str, str], list[BoundRow]] = {}
    for row in rows:
        groups.setdefault((row.format, row.kind), []).append(row)
    notes = (
        "expected: 3.29 √(Σ x²·E e²), which 99.9 % of errors should stay within",
        "all must hold: nothing exceeded, p99.9 within 3 × of expected, SQNR within 0.3 dB",
    )
    body = tuple(_summary_row(*key, group) for key, group in groups.items())
    return Table("Error bounds against real layers", columns, body, notes)


def _summary_row(name: str, kind: str, group: Sequence[BoundRow]) -> tuple[Cell, ...]:
    return (
        name,
        kind,
        len(group),
        sum(row.weight_violations + row.dot_violations for row in group),
        max(row.weight_worst for row in group),
        max(row.dot_worst for row in group),
        min(row.dot_expected for row in group),
        max(row.dot_expected for row in group),
        sum(row.sqnr_db for row in group) / len(group),
        max(abs(row.sqnr_db - row.predicted_db) for row in group),
        max(row.sum_worst for row in group),
    )
