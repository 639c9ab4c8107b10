"""The int8 stage by module: in which precision each is kept, what that costs, and how fast it is.

One row per kind of linear layer: weights int8 per channel, inputs int8 per token, quantized alone
(all layers of that kind at once), its KL measured. Speed is that of the integer operator on that
kind's shape, everything included, as a multiple of bfloat16 `F.linear`, for one row and for 16.
What is kept high is listed with its reason, as the report gives it.
"""

import re
from collections.abc import Sequence

from quantwatch.kernel_lab.bench import Contestant, measure_shape
from quantwatch.kernel_lab.measure import Yardstick
from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables.model import Cell, Column, Rows, Table, TableRequest
from quantwatch_kernels.formats import INT8
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.recipe import ActivationSpec, LayerRule, Recipe
from quantwatch_kernels.quantize.w8a8_linear import W8A8_LINEAR, W8A8Linear

_INT8 = Recipe.named("int8-channel").weights
_ROUNDS, _QUICK_ROUNDS = 40, 10
_ROWS = (1, 16)
_COLUMNS = (
    Column("module", "module"),
    Column("count", "matrices", "d"),
    Column("weights", "weights", ",d"),
    Column("precision", "precision"),
    Column("kl", "mean KL alone, nats", ".2e"),
    Column("kl_se", "± se", ".1e"),
    Column("speed_1", "× bf16, 1 row", ".2f"),
    Column("low_1", "95 % from", ".2f"),
    Column("high_1", "to", ".2f"),
    Column("speed_16", "× bf16, 16 rows", ".2f"),
    Column("low_16", "95 % from", ".2f"),
    Column("high_16", "to", ".2f"),
    Column("reason", "why it stays"),
)


def build(request: TableRequest) -> Table:
    """Measure one row per kind of layer, all of them together, and list what stays."""
    loaded = load_reference(request.model, request.cache_dir, off_grid_seed=request.seed)
    measured = yardstick(loaded, request.text, windows=request.windows)
    recipe = Recipe(_INT8, activations=ActivationSpec(INT8))
    _, report = measured.quantized(recipe)
    kinds = by_kind(report.converted)
    rows = Rows(_COLUMNS, request.tell)
    for kind, members in list(kinds.items())[: 2 if request.quick else None]:
        request.tell(f"{kind}: {len(members)} matrices")
        others = tuple(
            LayerRule(name, None) for other, names in kinds.items() if other != kind
            for name in names
        )  # fmt: skip
        alone = Recipe(_INT8, layers=others, activations=recipe.activations)
        rows.add(*_row(measured, kind, members, alone, request.quick))
    request.tell("all of them")
    rows.add(*_row(measured, "all of these", report.converted, recipe, None))
    rows += _kept(measured, report.skipped)
    notes = (
        f"{request.model} off its grid (seed {request.seed}), {measured.text.name}, "
        f"{measured.text.num_scored} scored tokens; KL with execution dequantized",
        "int8: weights per channel, inputs per token as they come; × bf16: integer operator with "
        "quantizing its input included against bfloat16 F.linear, interleaved",
    )
    return Table("The int8 stage by module", _COLUMNS, tuple(rows), notes)


def by_kind(names: Sequence[str]) -> dict[str, list[str]]:
    """Group layers by what is left of their names without numbers: layers.*.mlp.down_proj."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    return kinds


def _row(
    measured: Yardstick,
    kind: str,
    members: Sequence[str],
    recipe: Recipe,
    quick: bool | None,
) -> tuple[Cell, ...]:
    figures = measured.try_recipe(recipe)
    shapes = [_shape(measured, name) for name in members]
    count = sum(rows * columns for rows, columns in shapes)
    speeds: tuple[Cell, ...] = (None,) * 6 if quick is None else _speeds(shapes[0], quick)
    precision = "int8 weights and inputs"
    return (kind, len(members), count, precision, figures.kl, figures.kl_se, *speeds, None)


def _shape(measured: Yardstick, name: str) -> tuple[int, int]:
    paths = {scope: path for path, scope in measured.scopes.items()}
    rows, columns = (
        measured.module.get_submodule(paths.get(name, name)).get_parameter("weight").shape
    )
    return rows, columns


def _speeds(shape: tuple[int, int], quick: bool) -> tuple[Cell, ...]:
    int8 = Contestant(
        W8A8_LINEAR.name,
        "aten",
        "int8-channel",
        lambda weight: W8A8Linear(quantize_weight(weight, _INT8), None, backend="aten"),
    )
    cells: list[Cell] = []
    for rows in _ROWS:
        speed = measure_shape((rows, *shape), _QUICK_ROUNDS if quick else _ROUNDS, [int8])[0]
        cells += [speed.ratio, speed.ratio_low, speed.ratio_high]
    return tuple(cells)


def _kept(measured: Yardstick, skipped: Sequence[tuple[str, str]]) -> list[tuple[Cell, ...]]:
    """Return a row per matrix that stays, and one for all norms."""
    empty: tuple[Cell, ...] = (None,) * 8
    rows: list[tuple[Cell, ...]] = []
    for name, reason in skipped:
        rows.append((name, 1, None, "float32", *empty, reason))
    norms = [p for p in measured.module.parameters() if p.ndim == 1]
    if norms:
        count = sum(norm.numel() for norm in norms)
        why = "vectors are never quantized"
        rows.append(("norms and biases", len(norms), count, "float32", *empty, why))
    return rows
