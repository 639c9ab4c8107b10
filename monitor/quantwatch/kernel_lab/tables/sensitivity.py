"""What quantizing each part alone costs, beside the entropy of its activations.

Module, accuracy lost, activation entropy: the columns of the source articles' table, with KL added.
Two models: the one that is asked for, and a small mixture of experts that is trained on the spot
(`tiny_moe`), for experts, shared experts, routers and gates. Rounded to nearest, so that a row says
something of the part and not of a solver.

Does entropy predict sensitivity? The last note gives the rank correlation of the two over the rows
of each kind; the articles assume it does.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from quantwatch.kernel_lab.calibrating import some_of
from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables.model import Cell, Column, Table, TableRequest
from quantwatch.kernel_lab.tiny_moe import train_tiny_moe
from quantwatch.prompts.shipped import shipped_suite
from quantwatch_kernels.quantize.groups import KINDS, find_groups
from quantwatch_kernels.quantize.recipe import Recipe, WeightSpec
from quantwatch_kernels.quantize.sensitivity import Sensitivity, measure_sensitivity

FORMAT = "uint4-g64"
MOE_FORMAT = "uint4-g16"
"""The small model's rows are 48 and 64 wide: groups of 64 would be whole rows."""
_TOKENS, _QUICK_TOKENS = 1024, 512
_MOE_WINDOWS = 16
_COLUMNS = (
    Column("model", "model"),
    Column("module", "module"),
    Column("kind", "kind"),
    Column("format", "format"),
    Column("weights", "weights", ",d"),
    Column("bytes", "bytes", ",d"),
    Column("kl", "mean KL, nats", ".2e"),
    Column("kl_per_mb", "KL per MB", ".2e"),
    Column("agreement_lost", "top-1 changed", ".2%"),
    Column("accuracy_lost", "next-token accuracy lost", "+.2%"),
    Column("entropy", "activation entropy, nats", ".2f"),
)


def build(request: TableRequest) -> Table:
    """Measure every group of both models; with `quick` only whole layers of the large one."""
    loaded = load_reference(request.model, request.cache_dir, off_grid_seed=request.seed)
    measured = yardstick(loaded, request.text, windows=request.windows)
    texts = list(measured.text.windows)
    inputs = some_of(texts, _QUICK_TOKENS if request.quick else _TOKENS)
    kinds = ("embedding", "layer", "head") if request.quick else KINDS
    rows = _measured(request, measured.module, measured.scopes, inputs, (FORMAT, kinds))
    texts_moe = [prompt.text for prompt in shipped_suite("core-v1") if prompt.text]
    request.tell("training the small mixture of experts")
    moe = train_tiny_moe(texts_moe, steps=100 if request.quick else 300, seed=request.seed)
    windows = [torch.cat(moe.windows(_MOE_WINDOWS))]
    scopes = {f"model.layers.{n}{a}": f"layers.{n}{b}" for n in range(2) for a, b in _MOE_SCOPES}
    rows_moe = _measured(request, moe.model, scopes, windows, (MOE_FORMAT, KINDS))
    notes = (
        f"{request.model} off its grid (seed {request.seed}), {measured.text.name}: "
        f"{len(inputs)} windows, the second half of each scored; rounded to nearest",
        "tiny-moe: 2 layers, 6 experts of which 2 are used, trained on four fifths of core-v1 from "
        f"{moe.first_loss:.2f} to {moe.last_loss:.2f} nats per byte, measured on the last fifth",
        "each row quantized alone; a layer, attention, MLP or expert as a whole, without routers",
        "activation entropy: of a histogram of the module's output with 256 equal bins from its "
        "smallest to its largest value, at most 5.55",
        *_correlations(request.model, rows),
        *_correlations("tiny-moe", rows_moe),
    )
    cells = [*_cells(request.model, rows), *_cells("tiny-moe", rows_moe)]
    return Table("Sensitivity of every module", _COLUMNS, tuple(cells), notes)


_MOE_SCOPES = (("", ""), (".self_attn", ".attention"), (".mlp", ".mlp"))


def _measured(
    request: TableRequest,
    module: nn.Module,
    scopes: dict[str, str],
    inputs: Sequence[Tensor],
    what: tuple[str, Sequence[str]],
) -> list[Sensitivity]:
    name, kinds = what
    spec: WeightSpec = Recipe.named(name).with_weights(scale_dtype=torch.bfloat16).weights
    groups = [group for group in find_groups(module, scopes) if group.kind in kinds]
    rows = []
    for row in measure_sensitivity(module, inputs, groups, {name: spec}):
        request.tell(f"{row.group.name} ({row.group.kind}): {row.difference.kl:.2e}")
        rows.append(row)
    return rows


def _cells(model: str, rows: Sequence[Sensitivity]) -> list[tuple[Cell, ...]]:
    return [
        (
            *(model, row.group.name, row.group.kind, row.format),
            *(row.group.num_weights, row.num_bytes),
            *(row.difference.kl, 1e6 * row.difference.kl / row.num_bytes),
            *(row.difference.agreement_lost, row.difference.accuracy_lost, row.entropy),
        )
        for row in rows
    ]


def _correlations(model: str, rows: Sequence[Sensitivity]) -> list[str]:
    """Return a note per kind with at least 8 rows that have an entropy."""
    notes = []
    for kind in KINDS:
        pairs = [
            (row.entropy, row.difference.kl)
            for row in rows
            if row.group.kind == kind and row.entropy is not None
        ]
        if len(pairs) >= 8:
            rho = rank_correlation(*np.array(pairs).T)
            notes.append(
                f"{model}, {len(pairs)} × {kind}: rank correlation of entropy and KL {rho:+.2f}"
            )
    return notes


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's ρ of two columns without ties; NaN for a constant one."""
    ranks = [np.argsort(np.argsort(column)).astype(float) for column in (a, b)]
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
