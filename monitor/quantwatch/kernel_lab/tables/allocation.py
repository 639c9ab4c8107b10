"""Formats chosen by measured sensitivity against uniform and random ones of the same bytes.

All rows have the same budget and the same options per matrix, rounded to nearest (a calibrated
method would take ten minutes a row). Uniform: the largest format that all matrices can have, the
rest of the bytes from the first layer on. Random: one step up for random matrices for as long as
any fits. Predicted is the sum of what the matrices cost alone.
"""

from collections.abc import Sequence
from dataclasses import replace

from quantwatch.kernel_lab.allocate import (
    Wanted,
    chosen_recipe,
    fewest_bytes,
    groups_of,
    items_of,
    sensitivities,
)
from quantwatch.kernel_lab.calibrating import some_of
from quantwatch.kernel_lab.measure import Yardstick
from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables.model import Cell, Column, Rows, Table, TableRequest
from quantwatch.kernel_lab.targets import budget, check_target
from quantwatch.kernel_lab.texts import calibration_text
from quantwatch.models.recipes import kernel_recipe
from quantwatch_kernels.quantize.allocation import (
    Allocation,
    allocate,
    allocate_randomly,
    allocate_uniformly,
)
from quantwatch_kernels.quantize.groups import Group

TARGETS, QUICK_TARGETS = (4.85, 6.17), (4.85,)
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
_TOKENS, _QUICK_TOKENS = 1024, 512
_COLUMNS = (
    Column("target", "bits per weight, at most", ".2f"),
    Column("chosen", "formats chosen by"),
    Column("bits_per_weight", "bits per weight", ".4f"),
    Column("predicted_kl", "predicted KL, nats", ".4f"),
    Column("kl", "mean KL, nats", ".4f"),
    Column("kl_se", "± se", ".4f"),
    Column("same_top1", "same top-1", ".1%"),
    Column("ppl", "PPL", ".3f"),
)


def _check(measured: Yardstick, wanted: Wanted, targets: Sequence[float]) -> None:
    """Raise UserError for a target that can't be reached, before anything is measured."""
    groups = groups_of(measured, wanted)
    for target in targets:
        room = budget(measured.module, groups, target)
        check_target(measured.module, fewest_bytes(groups, wanted), room, target)


def build(request: TableRequest) -> Table:
    """Measure sensitivities once, then every way of choosing at every target."""
    loaded = load_reference(request.model, request.cache_dir, off_grid_seed=request.seed)
    measured = yardstick(loaded, request.text, windows=request.windows)
    calibration = calibration_text(loaded.tokenizer, request.text, skip=request.windows or 8)
    wanted = Wanted(TARGETS[0], method="nearest", tell=request.tell)
    targets = QUICK_TARGETS if request.quick else TARGETS
    _check(measured, wanted, targets)
    texts = some_of(calibration, _QUICK_TOKENS if request.quick else _TOKENS)
    found = sensitivities(measured, wanted, texts, calibration)
    groups = list({row.group.name: row.group for row in found}.values())
    items = items_of(found)
    rows = Rows(_COLUMNS, request.tell)
    for target in targets:
        room = budget(measured.module, groups, target)
        ways = {"sensitivity": allocate(items, room), "uniform": allocate_uniformly(items, room)}
        for seed in QUICK_SEEDS if request.quick else SEEDS:
            ways[f"random, seed {seed}"] = allocate_randomly(items, room, seed)
        for name, way in ways.items():
            request.tell(f"{target:g} bits per weight, {name}")
            wish = replace(wanted, target_bpw=target)
            rows.add(target, name, *_row(measured, wish, groups, way))
    notes = (
        f"{request.model} off its grid (seed {request.seed}), {measured.text.name}, "
        f"{measured.text.num_scored} scored tokens, execution dequantized, rounded to nearest with "
        f"clip {wanted.clip}",
        f"options: {', '.join(wanted.formats)}; embedding {', '.join(wanted.embedding)}; "
        f"{wanted.scale_dtype} scales",
        f"sensitivities on {len(texts)} texts that aren't measured",
    )
    return Table("Allocation by sensitivity", _COLUMNS, tuple(rows), notes)


def _row(
    measured: Yardstick, wanted: Wanted, groups: list[Group], way: Allocation
) -> tuple[Cell, ...]:
    recipe = kernel_recipe(chosen_recipe(wanted, groups, way, None))
    figures = measured.try_recipe(recipe)
    return (
        *(figures.bits_per_weight, way.cost, figures.kl, figures.kl_se),
        *(figures.same_top1, figures.ppl),
    )
