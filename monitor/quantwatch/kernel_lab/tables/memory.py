"""Weight memory of the int4 pipeline in its three steps, everything counted, and what it keeps.

The source articles' pipeline quantizes in three steps: (1) the linear layers to int4 in groups of
64, (2) with calibrated rounding (GPTQ) in place of nearest, which costs no byte, (3) the embedding,
tied to the head, to int8. Memory is what is stored: codes, scales, zero points, and norms and
everything else that stays, in bfloat16; the comparison is the whole model in bfloat16. Kept
accuracy is next-token top-1 on the scored tokens, as a share of the reference's.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantwatch.kernel_lab.measure import Figures, Yardstick
from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables.model import Cell, Column, Table, TableRequest
from quantwatch.kernel_lab.texts import calibration_text
from quantwatch_kernels.quantize.api import model_size, quantize_
from quantwatch_kernels.quantize.recipe import Recipe

_COLUMNS = (
    Column("step", "step"),
    Column("bytes", "bytes of weights", ",d"),
    Column("saved", "saved against bf16", ".1%"),
    Column("bits_per_weight", "bits per weight", ".3f"),
    Column("kl", "mean KL, nats", ".4f"),
    Column("kl_se", "± se", ".4f"),
    Column("same_top1", "same top-1", ".1%"),
    Column("accuracy", "next-token top-1", ".2%"),
    Column("kept", "kept", ".1%"),
)


def steps() -> tuple[tuple[str, Recipe], ...]:
    """Return the pipeline's recipes in order."""
    first = Recipe.named("uint4-g64").with_weights(scale_dtype=torch.bfloat16)
    second = first.with_weights(method="gptq")
    embedding = replace(Recipe.named("int8-channel").weights, scale_dtype=torch.bfloat16)
    return (
        ("1: linear layers int4, groups of 64", first),
        ("2: rounded by GPTQ", second),
        ("3: tied embedding int8", replace(second, embedding=embedding)),
    )


def build(request: TableRequest) -> Table:
    """Measure the reference in bfloat16 and the three steps."""
    loaded = load_reference(request.model, request.cache_dir, off_grid_seed=request.seed)
    measured = yardstick(loaded, request.text, windows=request.windows)
    calibration = calibration_text(
        loaded.tokenizer, request.text, skip=request.windows or 8, windows=16
    )
    ledger = _Ledger(measured)
    rows: list[tuple[Cell, ...]] = [_plain(measured, ledger)]
    for name, recipe in steps()[:1] if request.quick else steps():
        request.tell(name)
        rows.append(_row(measured, (name, recipe), calibration, ledger))
    notes = (
        f"{request.model} off its grid (seed {request.seed}), {measured.text.name}, "
        f"{measured.text.num_scored} scored tokens, execution dequantized, float32 activations",
        "calibration: "
        + ("the other prompts of core-v1" if request.text is None else "later windows of the text"),
        "bytes: codes, scales and zero points as stored, everything else in bfloat16",
    )
    return Table("Weight memory of the int4 pipeline", _COLUMNS, tuple(rows), notes)


class _Ledger:
    """What recipes take, on a copy of the model in bfloat16: so what stays is counted so, too."""

    def __init__(self, measured: Yardstick) -> None:
        self._plain = copy.deepcopy(measured.module).to(torch.bfloat16)
        self._scopes = measured.scopes
        self.whole, self.num_weights = model_size(self._plain)

    def bytes_of(self, recipe: Recipe) -> int:
        """Return the bytes of the quantized model; the way of rounding costs none."""
        nearest = recipe.with_weights(method="nearest")
        report = quantize_(copy.deepcopy(self._plain), nearest, scopes=self._scopes)
        return report.size_bytes


def _plain(measured: Yardstick, ledger: _Ledger) -> tuple[Cell, ...]:
    """Return the row of the model in bfloat16: its weights rounded, computed in float32."""
    rounded = copy.deepcopy(measured.module).to(torch.bfloat16).float()
    bits = 8 * ledger.whole / ledger.num_weights
    return ("bfloat16", ledger.whole, 0.0, bits, *_kept(measured.measure(rounded)))


def _row(
    measured: Yardstick,
    step: tuple[str, Recipe],
    calibration: Sequence[Tensor],
    ledger: _Ledger,
) -> tuple[Cell, ...]:
    name, recipe = step
    figures = measured.try_recipe(recipe, calibration=calibration if recipe.calibrated else None)
    size = ledger.bytes_of(recipe)
    bits = 8 * size / ledger.num_weights
    return (name, size, 1 - size / ledger.whole, bits, *_kept(figures))


def _kept(figures: Figures) -> tuple[Cell, ...]:
    kept = figures.accuracy / figures.accuracy_reference if figures.accuracy_reference else None
    return (figures.kl, figures.kl_se, figures.same_top1, figures.accuracy, kept)
