"""What INT8 scores cost attention, and what each repair is worth.

Queries, keys and values are the model's own, of one window, after rotary embeddings. The error of a
layer is ‖attention − exact‖ over its whole output, exact in float64; the table pools layers as
√(Σ‖error‖² ÷ Σ‖exact‖²) and says how many times smaller that is than with plain per-tensor codes,
and in which layer it is worth least. The mean KL is that of the model with this attention
everywhere (`serve = { attention = … }`) against itself.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from quantwatch.errors import ModelError
from quantwatch.kernel_lab.attention_inputs import AttentionInputs, attention_inputs
from quantwatch.kernel_lab.measure import Figures, Yardstick
from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables.model import Cell, Column, Rows, Table, TableRequest
from quantwatch.models.loaded import LoadedModel
from quantwatch_kernels.serve.attention_int8 import ATTENTIONS, Int8Scores
from quantwatch_kernels.serve.int8_single_pass import attention_in_int8, int8_text

_PLAIN = "int8-plain"
_COLUMNS = (
    Column("attention", "attention"),
    Column("error", "relative L2 error", ".3g"),
    Column("times", "× smaller than plain", ".2f"),
    Column("least", "least, of a layer", ".2f"),
    Column("layer", "that layer", "d"),
    Column("reach", "to reach, ×", ".1f"),
    Column("reached", "reached"),
    Column("kl", "mean KL, nats", ".3g"),
    Column("kl_se", "± se", ".2g"),
    Column("same_top1", "same top-1", ".1%"),
)
REACH = {"int8-smooth": 1.8, "int8-both": 1_000.0}
"""Of the pooled error, on SmolLM2-135M."""

Squares = list[tuple[float, float]]
"""Per layer ‖error‖² and ‖exact‖²."""


def build(request: TableRequest) -> Table:
    """Measure each attention; with `quick` four layers and two windows of KL."""
    loaded = load_reference(request.model, request.cache_dir, off_grid_seed=None)
    windows = 2 if request.quick else request.windows
    measured = yardstick(loaded, request.text, windows=windows)
    inputs = _inputs(request, loaded, measured.text.windows[0])
    exact = [each.exact() for each in inputs]
    plain = errors(inputs, exact, ATTENTIONS[_PLAIN])
    rows = Rows(_COLUMNS, request.tell)
    for name, how in ATTENTIONS.items():
        request.tell(name)
        squares = plain if name == _PLAIN else errors(inputs, exact, how)
        reach = REACH.get(name) if request.model == "smollm2-135m" else None
        layers = [each.layer for each in inputs]
        rows.add(name, *_row(layers, squares, plain, reach), *_kl(_through(measured, how)))
    return Table("INT8 attention", _COLUMNS, tuple(rows), _notes(request, measured, inputs))


def errors(inputs: Sequence[AttentionInputs], exact: Sequence[Tensor], how: Int8Scores) -> Squares:
    """Return ‖error‖² and ‖exact‖² of each layer."""
    found = (int8_text(each.text, how, each.mask, each.score).double() for each in inputs)
    return [
        (float((a - b).square().sum()), float(b.square().sum()))
        for a, b in zip(found, exact, strict=True)
    ]


def _inputs(request: TableRequest, loaded: LoadedModel, window: Tensor) -> list[AttentionInputs]:
    config = getattr(loaded.module, "config", None)
    count = int(getattr(config, "num_hidden_layers", 0))
    layers = {0, count // 3, 2 * count // 3, count - 1} if request.quick else set(range(count))
    try:
        return attention_inputs(loaded.module, window, frozenset(layers))
    except ValueError as error:
        raise ModelError(f"{request.model}: {error}") from error


def _row(
    layers: Sequence[int], squares: Squares, plain: Squares, reach: float | None
) -> tuple[Cell, ...]:
    # Not finite wherever a layer isn't.
    ratios = [
        math.sqrt(before / after) if after else math.inf
        for (after, _), (before, _) in zip(squares, plain, strict=True)
    ]
    least = min(range(len(ratios)), key=ratios.__getitem__)
    pooled, norm = sum(each for each, _ in squares), sum(each for _, each in squares)
    times = math.sqrt(sum(each for each, _ in plain) / pooled) if pooled else math.inf
    return (
        *(math.sqrt(pooled / norm), times, ratios[least], layers[least], reach),
        None if reach is None else times >= reach,
    )


def _through(measured: Yardstick, how: Int8Scores) -> Figures:
    with attention_in_int8(measured.module, how):
        return measured.measure(measured.module)


def _kl(figures: Figures) -> tuple[Cell, ...]:
    return figures.kl, figures.kl_se, figures.same_top1


def _notes(
    request: TableRequest, measured: Yardstick, inputs: Sequence[AttentionInputs]
) -> tuple[str, ...]:
    tokens, text = inputs[0].text[0].shape[2], measured.text
    return (
        f"{request.model} in float32 as it is, {text.name}; errors on the first window or prompt, "
        f"{tokens} tokens, {len(inputs)} layers; KL on {len(text.windows)} windows or prompts, "
        f"{text.num_scored} scored tokens",
        "codes of a text are made at once, as in a prefill; products with values are float32",
    )
