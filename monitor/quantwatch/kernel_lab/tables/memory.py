"""The int4 pipeline in its three steps: memory, accuracy kept, speed; everything counted.

The source articles' pipeline quantizes in three steps: (1) the linear layers to int4; (2) with
calibrated rounding (GPTQ) in place of nearest, which costs no byte; (3) the embedding, tied to the
head, to int8, and of what that saves a part is spent on int8 for the layers that lose most
(`recipes/smollm2-int4-pipeline.toml`). Memory is what is stored: codes, scales, zero points, and
norms and everything else that stays, in bfloat16; the comparison is the whole model in bfloat16.
Asked for: at least 63 % saved and at least 99.2 % of the reference's accuracy kept.

Two accuracies: next-token top-1 on the scored tokens, and a multiple-choice task by log-likelihood
(`choices`); kept is the share of the reference's, with a paired standard error (`kept`). Speed is
that of the native kernels with bfloat16 activations against the bfloat16 model (`throughput`).
"""

import copy
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quantwatch.config.recipes import load_recipe
from quantwatch.kernel_lab.choices import ChoiceFigures, ChoiceTask
from quantwatch.kernel_lab.measure import Figures, Yardstick
from quantwatch.kernel_lab.pipeline import FILE, Step, nearest, steps
from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables.ladder import recipes_folder
from quantwatch.kernel_lab.tables.model import Cell, Column, Rows, Table, TableRequest
from quantwatch.kernel_lab.texts import calibration_text
from quantwatch.kernel_lab.throughput import Throughput, throughput
from quantwatch.models.recipes import kernel_recipe
from quantwatch.prompts.choices import SHIPPED, read_choices
from quantwatch_kernels.quantize.api import Execution, QuantReport, model_size, quantize_
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.quantize.selection import scope_names, select

_WINDOWS = 8
"""Later windows of a text that recipes are calibrated on: 4,096 tokens."""
_PROMPT = 128
"""Tokens of the prompt that speed is measured on, at most."""
_ROUNDS, _QUICK_ROUNDS = 15, 5
_COLUMNS = (
    Column("step", "step"),
    Column("bytes", "bytes of weights", ",d"),
    Column("saved", "saved against bf16", ".1%"),
    Column("bits_per_weight", "bits per weight", ".3f"),
    Column("kl", "mean KL, nats", ".4f"),
    Column("kl_se", "± se", ".4f"),
    Column("same_top1", "same top-1", ".1%"),
    Column("accuracy", "next-token top-1", ".2%"),
    Column("kept", "kept", ".2%"),
    Column("kept_se", "± se", ".2%"),
    Column("choice", "multiple choice", ".1%"),
    Column("choice_kept", "kept", ".2%"),
    Column("choice_kept_se", "± se", ".2%"),
    Column("choice_norm", "per character", ".1%"),
    Column("same_choice", "same choice", ".1%"),
    Column("margin_change", "margin, nats", "+.3f"),
    Column("ties", "ties"),
    Column("decode", "decode, × bf16", ".2f"),
    Column("decode_low", "95 % from", ".2f"),
    Column("decode_high", "to", ".2f"),
    Column("prefill", "prefill, × bf16", ".2f"),
    Column("prefill_low", "95 % from", ".2f"),
    Column("prefill_high", "to", ".2f"),
)


def build(request: TableRequest) -> Table:
    """Measure the reference in bfloat16 and the three steps; with `quick` only the first."""
    items = read_choices(request.tasks)
    loaded = load_reference(request.model, request.cache_dir, off_grid_seed=request.seed)
    measured = yardstick(loaded, request.text, windows=request.windows)
    task = ChoiceTask(loaded.module, loaded.tokenizer, items)
    whole = steps(kernel_recipe(load_recipe(recipes_folder() / FILE)))
    pipeline = whole[:1] if request.quick else whole
    ledger = _Ledger(measured)
    request.tell("speed")
    rounds = _QUICK_ROUNDS if request.quick else _ROUNDS
    speeds = ledger.speeds([step.recipe for step in pipeline], rounds)
    skip = request.windows or 8
    texts = calibration_text(loaded.tokenizer, request.text, skip=skip, windows=_WINDOWS)
    rows = Rows(_COLUMNS, request.tell)
    rows.add(*_plain_row(measured, task, ledger))
    for step, speed in zip(pipeline, speeds, strict=True):
        request.tell(step.name)
        rows.add(*_row((measured, task, ledger), step, texts, speed))
    return Table(
        "The int4 pipeline: memory, accuracy kept, speed",
        _COLUMNS,
        tuple(rows),
        (*_notes(request, measured, task, ledger), ledger.formats(pipeline[-1].recipe)),
    )


class _Ledger:
    """Recipes on a copy of the model in bfloat16: so what stays is counted so, and so it is run.

    The way of rounding costs neither a byte nor a microsecond: these are rounded to nearest.
    """

    def __init__(self, measured: Yardstick) -> None:
        self._plain = copy.deepcopy(measured.module).to(torch.bfloat16)
        self._scopes = measured.scopes
        self.prompt = measured.text.windows[0][:, :_PROMPT]
        self.whole, self.num_weights = model_size(self._plain)
        self.fallbacks: dict[str, None] = {}

    def bytes_of(self, recipe: Recipe) -> int:
        """Return the bytes of the quantized model."""
        return self._quantized(recipe, "dequantized")[1].size_bytes

    def formats(self, recipe: Recipe) -> str:
        """Say how much of the linear layers is in which format, and by which rules."""
        counts: Counter[str] = Counter()
        for layer in select(self._plain, recipe, scope_names(self._plain, self._scopes)).layers:
            if not isinstance(layer.module, nn.Embedding):
                counts[layer.spec.format.name] += layer.weight.numel()
        shares = ", ".join(f"{name} {n / counts.total():.1%}" for name, n in counts.most_common())
        rules = ", ".join(rule.match for rule in recipe.layers)
        return f"linear weights of the last row: {shares}; exceptions: {rules or 'none'}"

    def speeds(self, recipes: Sequence[Recipe], rounds: int) -> list[Throughput]:
        """Return the speed of each recipe; those that differ in their rounding alone share one."""
        distinct = list(dict.fromkeys(map(nearest, recipes)))
        built = [self._quantized(recipe, "aten") for recipe in distinct]
        for _, report in built:
            self.fallbacks |= dict.fromkeys(f"{name}: {why}" for name, why in report.fallbacks)
        models = [module for module, _ in built]
        found = throughput(self._plain, models, self.prompt, rounds=rounds)
        return [found[distinct.index(nearest(recipe))] for recipe in recipes]

    def _quantized(self, recipe: Recipe, execution: Execution) -> tuple[nn.Module, QuantReport]:
        module = copy.deepcopy(self._plain)
        return module, quantize_(module, nearest(recipe), execution=execution, scopes=self._scopes)


def _plain_row(measured: Yardstick, task: ChoiceTask, ledger: _Ledger) -> tuple[Cell, ...]:
    """Return the row of the model in bfloat16: its weights rounded, computed in float32."""
    rounded = copy.deepcopy(measured.module).to(torch.bfloat16).float()
    bits = 8 * ledger.whole / ledger.num_weights
    return (
        *("bfloat16", ledger.whole, 0.0, bits),
        *_kept(measured.measure(rounded), task.measure(rounded)),
        *(1.0, None, None, 1.0, None, None),
    )


def _row(
    what: tuple[Yardstick, ChoiceTask, _Ledger],
    step: Step,
    texts: Sequence[Tensor],
    speed: Throughput,
) -> tuple[Cell, ...]:
    (measured, task, ledger), recipe = what, step.recipe
    size = ledger.bytes_of(recipe)
    module, report = measured.quantized(recipe, calibration=texts if recipe.calibrated else None)
    ratios = [getattr(r, name) for r in (speed.decode, speed.prefill) for name in _RATIO]
    return (
        *(step.name, size, 1 - size / ledger.whole, 8 * size / ledger.num_weights),
        *_kept(measured.measure(module, report), task.measure(module)),
        *ratios,
    )


_RATIO = ("ratio", "low", "high")


def _kept(figures: Figures, choice: ChoiceFigures) -> tuple[Cell, ...]:
    return (
        *(figures.kl, figures.kl_se, figures.same_top1),
        *(figures.accuracy, figures.kept, figures.kept_se),
        *(choice.accuracy, choice.kept.share, choice.kept.se, choice.accuracy_norm),
        *(choice.same_choice, choice.margin_change, choice.num_ties),
    )


def _notes(
    request: TableRequest, measured: Yardstick, task: ChoiceTask, ledger: _Ledger
) -> tuple[str, ...]:
    name = SHIPPED if request.tasks is None else request.tasks.name
    source = "the other prompts of core-v1" if request.text is None else "later windows of the text"
    said = (
        f"{request.model} off its grid (seed {request.seed}), {measured.text.name}, "
        f"{measured.text.num_scored} scored tokens, execution dequantized, float32 activations; "
        f"calibration: {source}",
        "bytes: codes, scales and zero points as stored, everything else in bfloat16",
        f"multiple choice: {name}, {task.num_items} items, the reference's accuracy "
        f"{task.accuracy:.1%}; the option with the largest sum of log-probabilities, "
        "per character: divided by its length first; ties take the first letter",
        "kept: share of the reference's accuracy, ± paired standard error (by window, by item); "
        "its 95 % interval is ± 1.96 of them. Asked for: at least 63 % saved, 99.2 % kept of both",
        "margin: mean change of the right option's score minus the best wrong one's",
        f"speed: native kernels, bfloat16 activations, {torch.get_num_threads()} thread(s), a "
        f"prompt of {ledger.prompt.shape[1]} tokens; ratios of interleaved calls, shared by steps "
        "that differ in rounding alone; absolute speeds of a shared machine can't be compared",
    )
    others = "; ".join(ledger.fallbacks)
    return (*said, f"computed dequantized: {others}") if others else said
