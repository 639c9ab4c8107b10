"""Training against rounding: the last decoder blocks in 3 bits, by QAT and GPTQ on the same data.

The linear layers of the last two blocks become uint3 in groups of 64 (ranges by MSE); everything
else, the frozen prefix included, stays the float32 reference. Rows: rounded to nearest; GPTQ;
weights and ranges trained from nearest; ranges trained with GPTQ's codes held fixed; weights and
ranges trained from GPTQ. All methods see the same sequences; a seed decides their order alone, so
the spread over seeds is that of training. Held-out windows are run from the first trained block
on: what enters it is the reference's in every row, and is computed once.

Steps to converge: the first step at which the loss, averaged over the last pass (every sequence
once), is within 5 % of the least such average of the run. Gradient variance: of one sequence's
gradient, summed over all learned numbers, over the squared norm of the step's mean gradient;
geometric mean over the steps. It is comparable between rows that learn different things.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantwatch.kernel_lab.measure import Yardstick
from quantwatch.kernel_lab.qat_bench import QatBench, Run
from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables.model import Cell, Column, Table, TableRequest
from quantwatch.kernel_lab.texts import calibration_text
from quantwatch_kernels.quantize.latent import Start
from quantwatch_kernels.quantize.qat import QatOptions, QatStep
from quantwatch_kernels.quantize.recipe import Recipe

SEEDS = 3
BLOCKS = 2
SEQUENCES = 8
TOKENS = 256
STEPS = 24
QUICK_STEPS = 6
_NEAREST = Recipe.named("uint3-g64").with_weights(clip="mse", scale_dtype=torch.bfloat16)
_GPTQ = _NEAREST.with_weights(method="gptq")
_BOTH = QatOptions("both", steps=STEPS, lr=1e-3, range_lr=3e-3)
_RANGES = QatOptions("scales", steps=STEPS, range_lr=2e-3)
_TRAINED = (
    ("QAT: weights and ranges, from nearest", "nearest", _BOTH),
    ("ranges alone, GPTQ's codes fixed", "GPTQ", _RANGES),
    ("QAT: weights and ranges, from GPTQ", "GPTQ", replace(_BOTH, lr=3e-4, range_lr=1e-3)),
)
_COLUMNS = (
    Column("method", "method"),
    Column("kl", "held-out mean KL, nats", ".5f"),
    Column("kl_sd", "sd over seeds", ".5f"),
    Column("kl_se", "se over windows", ".5f"),
    Column("same_top1", "same top-1", ".1%"),
    Column("train_kl", "KL on the training data", ".5f"),
    Column("train_sd", "sd", ".5f"),
    Column("steps", "steps to converge, mean", ".1f"),
    Column("norm", "gradient norm, first step", ".4f"),
    Column("variance", "gradient variance / norm²", ".2f"),
    Column("variance_sd", "sd", ".2f"),
    Column("seconds", "s per step", ".1f"),
    Column("seeds", "seeds"),
)


def build(request: TableRequest) -> Table:
    """Quantize and train the last blocks of the reference, and measure them."""
    loaded = load_reference(request.model, request.cache_dir, off_grid_seed=request.seed)
    measured = yardstick(loaded, request.text, windows=request.windows)
    skip = request.windows or len(measured.text.windows)
    texts = calibration_text(loaded.tokenizer, request.text, skip=skip, windows=16)
    count, tokens = (4, 64) if request.quick else (SEQUENCES, TOKENS)
    return compare(measured, sequences(texts, count, tokens), request)


def sequences(texts: Sequence[Tensor], count: int, tokens: int) -> list[Tensor]:
    """Return the first `count` pieces [1, tokens] of the texts.

    Raises ValueError if they hold fewer.
    """
    pieces = [
        piece for ids in texts for piece in torch.split(ids, tokens, 1) if piece.shape[1] == tokens
    ]
    if len(pieces) < count:
        raise ValueError(f"{len(pieces)} sequences of {tokens} tokens; {count} are needed.")
    return pieces[:count]


def compare(measured: Yardstick, data: Sequence[Tensor], request: TableRequest) -> Table:
    """Return the table of a reference that is set up, for these training sequences."""
    request.tell("what the reference says to the data and to the held-out windows")
    bench = QatBench(measured, data, BLOCKS)
    starts, rows, losses = {}, [], []
    for name, recipe in (("nearest", _NEAREST), ("GPTQ", _GPTQ)):
        request.tell(name)
        starts[name] = bench.quantize(recipe)
        figures, loss = bench.untrained(starts[name])
        held: tuple[Cell, ...] = (figures.kl, None, figures.kl_se, figures.same_top1)
        rows.append((name, *held, loss, *[None] * 7))
    for name, start, options in _TRAINED:
        request.tell(name)
        used = replace(options, steps=QUICK_STEPS) if request.quick else options
        runs = _trained(bench, starts[start], used, request)
        window = max(1, len(data) // used.inputs_per_step)
        rows.append((name, *_cells(runs, window)))
        first, least = _ends([run.record.steps for run in runs], window)
        losses.append(f"{name} {first:.4f} → {least:.4f}")
    return Table("QAT against PTQ", _COLUMNS, tuple(rows), _notes(bench, request, losses))


def _trained(
    bench: QatBench, starts: Sequence[Start], options: QatOptions, request: TableRequest
) -> list[Run]:
    runs = []
    for seed in range(request.seed, request.seed + SEEDS):
        request.tell(f"seed {seed}")
        runs.append(bench.train(starts, replace(options, seed=seed)))
        request.tell(f"held-out KL {runs[-1].figures.kl:.5f}, {runs[-1].seconds:.1f} s a step")
    return runs


def _notes(bench: QatBench, request: TableRequest, losses: Sequence[str]) -> tuple[str, ...]:
    text = bench.measured.text
    tokens = sum(ids.numel() for ids in bench.data)
    rates = "; ".join(f"{name}: {_rates(options)}" for name, _, options in _TRAINED)
    steps = QUICK_STEPS if request.quick else STEPS
    return (
        f"{request.model} off its grid (seed {request.seed}), held out: {len(text.windows)} "
        f"windows of {text.name}, {text.num_scored} scored tokens",
        f"only the linear layers of the last {BLOCKS} blocks are quantized ({_NEAREST.name}, "
        f"bfloat16 scales) or trained; the frozen prefix is the float32 reference",
        f"all methods on the same {len(bench.data)} sequences, {tokens} tokens; loss: KL over "
        f"all positions; AdamW, cosine, {_BOTH.inputs_per_step} sequences a "
        f"step, {steps} steps, "
        f"clipped at a global norm of {_BOTH.clip_norm:g}, float32 throughout",
        f"learning rates: {rates}",
        f"loss averaged over a pass, first → least, mean over seeds: {'; '.join(losses)}",
    )


def _rates(options: QatOptions) -> str:
    ranges = f"ranges {options.range_lr:g}"
    return ranges if options.learn == "scales" else f"weights {options.lr:g}, {ranges}"


def _cells(runs: Sequence[Run], window: int) -> tuple[Cell, ...]:
    """Return a trained row's cells after its name: means over seeds, their spread beside them."""
    columns: Mapping[str, list[float]] = {
        "kl": [run.figures.kl for run in runs],
        "train": [run.record.final_loss for run in runs],
        "variance": [_noise(run.record.steps) for run in runs],
    }
    mean = {name: statistics.fmean(values) for name, values in columns.items()}
    sd = {name: statistics.stdev(values) for name, values in columns.items()}
    return (
        mean["kl"],
        sd["kl"],
        statistics.fmean(run.figures.kl_se for run in runs),
        statistics.fmean(run.figures.same_top1 for run in runs),
        mean["train"],
        sd["train"],
        statistics.fmean(steps_to_converge(run.record.steps, window) for run in runs),
        statistics.fmean(run.record.steps[0].gradient_norm for run in runs),
        mean["variance"],
        sd["variance"],
        statistics.fmean(run.seconds for run in runs),
        len(runs),
    )


def steps_to_converge(steps: Sequence[QatStep], window: int, tolerance: float = 0.05) -> int:
    """Return the first step at which the loss over `window` steps is within 5 % of its least.

    Counted from 1. Raises ValueError if the run is shorter than the window.
    """
    means = _moving(steps, window)
    enough = (1 + tolerance) * min(means)
    return window + next(number for number, mean in enumerate(means) if mean <= enough)


def _moving(steps: Sequence[QatStep], window: int) -> list[float]:
    if len(steps) < window:
        raise ValueError(f"a run of {len(steps)} steps has no average over {window}.")
    losses = [step.loss for step in steps]
    return [statistics.fmean(losses[n : n + window]) for n in range(len(losses) - window + 1)]


def _ends(runs: Sequence[Sequence[QatStep]], window: int) -> tuple[float, float]:
    """Return the first and the least average loss over a pass, means over the runs."""
    means = [_moving(steps, window) for steps in runs]
    return statistics.fmean(m[0] for m in means), statistics.fmean(min(m) for m in means)


def _noise(steps: Sequence[QatStep]) -> float:
    """Return the geometric mean of variance over squared norm; NaN if one isn't positive."""
    shares = [step.gradient_variance / step.gradient_norm**2 for step in steps]
    if not all(share > 0 for share in shares):
        return math.nan
    return math.exp(statistics.fmean(map(math.log, shares)))
