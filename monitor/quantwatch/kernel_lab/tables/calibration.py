"""Calibration sets: does it matter which prompts set the ranges of static W8A8?

int8 weights per output channel, uint8 activations with one static min-max range per layer: there
the samples decide most. A seed draws half of the pool; from that half each selection takes its
samples, so that all selections meet the same halves and differences are paired. Scores, features
and ranges are measured once on the pool. The held-out prompts are never in it. Samples are cut to
one length: else a set's tokens, and the variance that falls with length, would decide.

The spread over seeds comes first: a selection is better or worse than a random draw only where the
interval of the paired difference leaves 0 out. "lowest score" is the control of the article's
score, "whole half" what all of the half gives.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quantwatch.baselines.student import quantile
from quantwatch.kernel_lab.measure import Yardstick
from quantwatch.kernel_lab.references import load_reference
from quantwatch.kernel_lab.tables.model import Cell, Column, Table, TableRequest
from quantwatch.kernel_lab.texts import Text, calibration_text, measured_text
from quantwatch.models.loaded import LoadedModel
from quantwatch_kernels.calibration.coverage import length_labels
from quantwatch_kernels.calibration.pool import draw
from quantwatch_kernels.calibration.ranges import joined_ranges, sample_ranges, set_ranges
from quantwatch_kernels.calibration.scores import combined_score, highest, pool_ranks
from quantwatch_kernels.calibration.selection import SELECTIONS, choose, measure_pool
from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.activations import ActivationQuantizer, add_activation_quantizer
from quantwatch_kernels.quantize.api import QuantReport
from quantwatch_kernels.quantize.recipe import ActivationSpec, PerTensor, Recipe

SEEDS = 10
SAMPLES = 8
POOL = 48
HELD_OUT = 8
LENGTH = 128
_SPEC = ActivationSpec(INT_FORMATS["uint8"], PerTensor(), static=True)
_SCORE, _LOWEST, _WHOLE = "entropy-attention", "lowest score", "whole half"
_COLUMNS = (
    Column("selection", "selection"),
    Column("kl", "mean KL, nats", ".4f"),
    Column("sd", "sd over seeds", ".4f"),
    Column("least", "least", ".4f"),
    Column("most", "most", ".4f"),
    Column("difference", "− random, paired", "+.4f"),
    Column("low", "95 % from", "+.4f"),
    Column("high", "to", "+.4f"),
    Column("wins", "seeds below random"),
    Column("tokens", "tokens, mean", ".0f"),
    Column("sets", "different sets"),
)


@dataclass(slots=True)
class _Bench:
    """A quantized candidate whose static ranges can be set, and what was measured of the pool."""

    measured: Yardstick
    candidate: nn.Module
    report: QuantReport
    quantizers: list[ActivationQuantizer]
    pool: list[Tensor]
    ranges: Tensor
    known: dict[frozenset[int], float] = field(default_factory=dict)

    def kl(self, samples: tuple[int, ...]) -> float:
        """Return the mean KL with ranges from these samples; the same set is measured once."""
        key = frozenset(samples)
        if key not in self.known:
            set_ranges(self.quantizers, joined_ranges(self.ranges, samples))
            self.known[key] = self.measured.measure(self.candidate, self.report).kl
        return self.known[key]

    def tokens(self, samples: tuple[int, ...]) -> int:
        """Return how many tokens they have together."""
        return sum(self.pool[number].shape[1] for number in samples)


@dataclass(frozen=True, slots=True)
class _Outcome:
    kl: float
    samples: tuple[int, ...]
    tokens: int
    notes: tuple[str, ...]


def build(request: TableRequest) -> Table:
    """Measure every selection on every seed's half of the pool."""
    loaded = load_reference(request.model, request.cache_dir, off_grid_seed=request.seed)
    text = measured_text(loaded.tokenizer, request.text, windows=request.windows)
    text = Text(text.name, tuple(_cut(text.windows, 4 if request.quick else HELD_OUT)))
    skip = request.windows or len(text.windows)
    pool = calibration_text(loaded.tokenizer, request.text, skip=skip, windows=POOL)
    pool = _cut(pool, POOL // 2 if request.quick else POOL)
    return compare(_prepared(loaded, text, pool, request.tell), request)


def _cut(items: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return the beginnings of `count` items, evenly spaced, or of all if there are fewer."""
    count = min(count, len(items))
    return [items[place * len(items) // count][:, :LENGTH] for place in range(count)]


def _prepared(
    loaded: LoadedModel, text: Text, pool: list[Tensor], tell: Callable[[str], None]
) -> _Bench:
    scopes = {path: str(scope) for path, scope in loaded.anatomy.scopes_by_path.items()}
    return prepared(Yardstick(loaded.module, text, scopes), pool, tell)


def prepared(measured: Yardstick, pool: list[Tensor], tell: Callable[[str], None]) -> _Bench:
    """Quantize the weights and observe every sample's ranges."""
    tell(f"ranges of {len(pool)} samples")
    candidate, report = measured.quantized(Recipe.named("int8-channel"))
    paths = {scope: path for path, scope in measured.scopes.items()}
    layers = [(n, candidate.get_submodule(paths.get(n, n))) for n in report.converted]
    ranges = sample_ranges(candidate, layers, pool)
    quantizers = [add_activation_quantizer(module, name, _SPEC) for name, module in layers]
    return _Bench(measured, candidate, report, quantizers, pool, ranges)


def compare(bench: _Bench, request: TableRequest) -> Table:
    """Return the table of a prepared candidate."""
    scored: dict[str, Tensor] = {}
    for name in SELECTIONS:
        request.tell(f"{name}: measuring {len(bench.pool)} samples")
        scored[name] = measure_pool(bench.measured.module, bench.pool, name)
    outcomes: dict[str, list[_Outcome]] = {}
    for seed in range(request.seed, request.seed + (3 if request.quick else SEEDS)):
        request.tell(f"seed {seed}")
        half = sorted(draw(range(len(bench.pool)), len(bench.pool) // 2, seed))
        for chosen, (samples, notes) in _chosen(scored, bench.pool, half, seed).items():
            found = _Outcome(bench.kl(samples), samples, bench.tokens(samples), notes)
            outcomes.setdefault(chosen, []).append(found)
    baseline = [outcome.kl for outcome in outcomes["random"]]
    rows = tuple(_row(name, found, baseline) for name, found in outcomes.items())
    return Table(
        "Calibration samples for static W8A8",
        _COLUMNS,
        rows,
        _notes(bench, request, scored, outcomes),
    )


def _chosen(
    scored: Mapping[str, Tensor], pool: list[Tensor], half: list[int], seed: int
) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Return each selection's samples, as numbers in the pool, and its notes."""
    count = min(SAMPLES, len(half))
    sequences = [pool[number] for number in half]
    uneven = len({ids.shape[1] for ids in sequences}) > 1
    labels = length_labels(sequences) if uneven else None
    found: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    for name in SELECTIONS:
        chosen = choose(name, scored[name][half], count, seed=seed, labels=labels)
        found[name] = chosen.indices, chosen.notes
    worst = highest(-combined_score(scored[_SCORE][half]), count)
    found[_LOWEST] = tuple(worst), ()
    found[_WHOLE] = tuple(range(len(half))), ()
    return {name: (tuple(half[n] for n in inner), notes) for name, (inner, notes) in found.items()}


def _row(name: str, found: list[_Outcome], baseline: list[float]) -> tuple[Cell, ...]:
    values = [outcome.kl for outcome in found]
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    tokens = statistics.fmean(outcome.tokens for outcome in found)
    sets = len({frozenset(outcome.samples) for outcome in found})
    if name == "random":
        compared: tuple[Cell, ...] = (None, None, None, None)
    else:
        gaps = [a - b for a, b in zip(values, baseline, strict=True)]
        gap, wide = statistics.fmean(gaps), _half_width(gaps)
        compared = (gap, gap - wide, gap + wide, f"{sum(g < 0 for g in gaps)} of {len(gaps)}")
    return name, mean, spread, min(values), max(values), *compared, tokens, sets


def _half_width(gaps: list[float]) -> float:
    """Return half of the 95 % interval of a mean, by Student's t over the seeds."""
    return quantile(0.95, len(gaps) - 1) * statistics.stdev(gaps) / math.sqrt(len(gaps))


def _notes(
    bench: _Bench,
    request: TableRequest,
    scored: Mapping[str, Tensor],
    outcomes: Mapping[str, list[_Outcome]],
) -> tuple[str, ...]:
    text = bench.measured.text
    half = len(bench.pool) // 2
    agree = _rank_correlation(*scored[_SCORE].unbind(1))
    notes = [outcome.notes for outcome in outcomes["hierarchical"]]
    return (
        f"{request.model} off its grid (seed {request.seed}), held out: {len(text.windows)} of "
        f"{text.name}, {text.num_scored} scored tokens",
        f"a seed draws {half} of {len(bench.pool)} samples, a selection takes "
        f"{min(SAMPLES, half)} of those; intervals: Student's t over "
        f"{len(outcomes['random'])} paired seeds",
        "int8 weights per channel, uint8 activations per tensor, static min-max, ranges exact per "
        f"set; samples cut to {LENGTH} tokens, coverage and extremes stratified by thirds of "
        "length where that leaves several lengths",
        f"rank correlation of entropy and attention variance over the pool: {agree:+.2f}",
        *(
            f"hierarchical, seed {request.seed + n}: {'; '.join(said)}"
            for n, said in enumerate(notes)
        ),
    )


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([pool_ranks(a), pool_ranks(b)]))[0, 1])
