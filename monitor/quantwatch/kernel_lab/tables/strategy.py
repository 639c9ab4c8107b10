"""The article's comparison of strategies, for a KV cache: error, first token, decay.

One row per strategy, all against the same model with a float32 cache:

- *attention logits*, *attention output*: relative L2 error in attention itself, given the plain
  model's queries, keys and values (`serve.kv_errors`), on two windows of 512 tokens;
- *model's logits*: relative L2 error of the output, centred per token, over the scored tokens;
- *first token*: perplexity of the token behind the prefill, candidate ÷ reference − 1, paired;
- *KL by position*: four equal parts behind the prefill, and its slope per 1,000 tokens;
- *perplexity per 1,000 tokens*: slope of ln p(reference) − ln p(candidate) of the text's tokens;
- *greedy*: where the text that the model writes parts from the reference's.

A prompt of 384 tokens comes at once, all others one by one, each stored before it is attended to.
Slopes are least squares over all tokens of a window; their mean and standard error are over
windows. Bits per cached number are those of a window's length.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantwatch.kernel_lab.long_texts import (
    Continued,
    greedy,
    long_texts,
    median_parting,
    parting,
    rate_per_1000,
)
from quantwatch.kernel_lab.references import load_reference
from quantwatch.kernel_lab.tables.kv_rows import bits
from quantwatch.kernel_lab.tables.model import Cell, Column, Rows, Table, TableRequest
from quantwatch.kernel_lab.texts import WINDOW
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.shapes import context_length
from quantwatch_kernels.serve.kv_reads import Arrivals
from quantwatch_kernels.serve.kv_scheme import scheme_named
from quantwatch_kernels.serve.kv_single_pass import attention_errors, quantized_kv

PREFILL, _LENGTH, _PARTS = 384, 1536, 4
_PROMPT, _NEW = 128, 256
STRATEGIES = (
    "float16", "bfloat16", "int8-chunk", "int8-chunk-r4", "int8-symmetric", "int8-r4",
    "int8-symmetric+top4", "int8-policy", "int8", "int4-plain", "int4-plain+r4",
    "int4-plain+sinks4+window32", "int4-plain+top4", "int4-hadamard", "kivi4", "k5v4",
)  # fmt: skip
QUICK = ("bfloat16", "int8-symmetric", "int8-r4", "kivi4")
COLUMNS = (
    Column("strategy", "strategy"),
    Column("bits", "bits per cached number", ".3f"),
    Column("l2_scores", "attention logits, L2", ".2e"),
    Column("l2_attention", "attention output, L2", ".2e"),
    Column("l2_logits", "model's logits, L2", ".2e"),
    Column("first_ppl", "first token, PPL", "+.2%"),
    Column("first_se", "± se", ".2%"),
    *(Column(f"kl_{part}", f"KL, part {part}", ".5f") for part in range(1, _PARTS + 1)),
    Column("kl_slope", "KL per 1,000 tokens", "+.5f"),
    Column("kl_slope_se", "± se", ".5f"),
    Column("ppl_slope", "PPL per 1,000 tokens", "+.2%"),
    Column("ppl_slope_se", "± se", ".2%"),
    Column("greedy_parted", "greedy texts that part", ".0%"),
    Column("greedy_median", "median tokens in common", ".0f"),
    Column("greedy_rate", "partings per 1,000 tokens", ".2f"),
)


@dataclass(frozen=True, slots=True)
class _Lab:
    """The reference and what it says of the texts."""

    loaded: LoadedModel
    windows: tuple[Tensor, ...]
    plain: tuple[Tensor, ...]
    """Its logits [T − prefill, V] behind each window's prefill."""
    continued: Continued


@dataclass(frozen=True, slots=True)
class Series:
    """What a candidate does at each position of one window behind its prefill, float64 [n]."""

    kl: Tensor
    nll: Tensor
    """ln p(reference) − ln p(candidate) of the text's next token."""
    squares: tuple[float, float]
    """Σ of squares of centred logits: of the difference, of the reference's."""


def build(request: TableRequest) -> Table:
    """Measure each strategy; with `quick` four of them on two windows of 512 tokens."""
    loaded = load_reference(request.model, request.cache_dir, off_grid_seed=None)
    most = min(_LENGTH, context_length(loaded.module) or _LENGTH)
    length = WINDOW if request.quick else most // WINDOW * WINDOW
    count = 2 if request.quick else max(4, (request.windows or 0) * WINDOW // length)
    texts = long_texts(loaded.tokenizer, request.text, count, length)
    request.tell("the reference's greedy texts")
    plain = tuple(_logits(loaded.module, window) for window in texts.windows)
    prompts = torch.cat([window[:, :_PROMPT] for window in texts.windows])
    new = 32 if request.quick else _NEW
    lab = _Lab(loaded, texts.windows, plain, greedy(loaded.module, prompts, new))
    rows = Rows(COLUMNS, request.tell)
    for name in QUICK if request.quick else STRATEGIES:
        rows.add(*_row(lab, name))
    return Table("Strategies", COLUMNS, tuple(rows), _notes(request, lab, texts.name, rows))


def _row(lab: _Lab, name: str) -> tuple[Cell, ...]:
    scheme, module = scheme_named(name), lab.loaded.module
    short = [window[:, :WINDOW] for window in lab.windows[:2]]
    errors = attention_errors(module, scheme, short, Arrivals(PREFILL))
    with quantized_kv(module, scheme, Arrivals(PREFILL)):
        pairs = zip(lab.windows, lab.plain, strict=True)
        series = [compared(plain, _logits(module, window), window) for window, plain in pairs]
    with quantized_kv(module, scheme, Arrivals(lab.continued.prompt)):
        common, parted = parting(module, lab.continued)
    return (
        *(
            name,
            bits(lab.loaded, scheme, lab.windows[0].shape[1])["bits"],
            errors.scores,
            errors.outputs,
        ),
        _l2(series),
        *_growth([one.nll[0].item() for one in series]),
        *by_part([one.kl for one in series]),
        *mean_se([slope_per_1000(one.kl) for one in series]),
        *_growth([slope_per_1000(one.nll) for one in series]),
        float(parted.double().mean()),
        median_parting(common.tolist(), parted.tolist()),
        rate_per_1000(common, parted),
    )


def _logits(module: Any, window: Tensor) -> Tensor:
    """Return float32 logits [T − prefill, V] of the tokens behind the prefill."""
    scored = torch.arange(PREFILL - 1, window.shape[1] - 1)
    with torch.inference_mode():
        found: Tensor = module(window, use_cache=False, logits_to_keep=scored).logits
    return found[0].float()


def compared(plain: Tensor, found: Tensor, window: Tensor) -> Series:
    """Compare logits [n, V] behind a window's prefill, in float64, some rows at a time."""
    kl, nll, squares = list[Tensor](), list[Tensor](), [0.0, 0.0]
    targets = window[0, PREFILL:]
    for begin in range(0, len(plain), 128):
        rows = slice(begin, begin + 128)
        p, q = (x[rows].double().log_softmax(-1) for x in (plain, found))
        kl.append((p.exp() * (p - q)).sum(-1))
        nll.append((p - q).gather(-1, targets[rows, None])[:, 0])
        z = [x[rows].double() - x[rows].double().mean(-1, keepdim=True) for x in (plain, found)]
        squares[0] += float((z[1] - z[0]).square().sum())
        squares[1] += float(z[0].square().sum())
    return Series(torch.cat(kl), torch.cat(nll), (squares[0], squares[1]))


def _l2(series: list[Series]) -> float:
    error, true = (sum(one.squares[side] for one in series) for side in (0, 1))
    return math.sqrt(error / true)


def by_part(kl: list[Tensor]) -> tuple[float, ...]:
    """Return the mean of each of the equal parts, over windows of one length."""
    parts = torch.stack(kl).mean(0).tensor_split(_PARTS)
    return tuple(float(part.mean()) for part in parts)


def slope_per_1000(values: Tensor) -> float:
    """Return the least-squares slope over positions, per 1,000 tokens."""
    x = torch.arange(len(values), dtype=torch.float64)
    x -= x.mean()
    return float(1000 * (x * values).sum() / x.square().sum())


def mean_se(values: list[float]) -> tuple[float, float]:
    """Return the mean over windows and its standard error, NaN with one window."""
    found, count = torch.tensor(values, dtype=torch.float64), len(values)
    spread = float(found.std()) if count > 1 else math.nan
    return float(found.mean()), spread / math.sqrt(count)


def _growth(log_ratios: list[float]) -> tuple[float, float]:
    """Return exp(mean) − 1 and its standard error, to first order."""
    mean, se = mean_se(log_ratios)
    return math.expm1(mean), math.exp(mean) * se


def _notes(request: TableRequest, lab: _Lab, name: str, rows: Rows) -> tuple[str, ...]:
    found = {row[0]: row for row in rows}
    return (
        f"{request.model} in float32, {name}: {len(lab.windows)} windows of "
        f"{lab.windows[0].shape[1]} tokens, the first {PREFILL} at once; parts are of the others",
        f"greedy: {len(lab.continued.ids)} prompts of {_PROMPT} tokens, "
        f"{int(lab.continued.usable.sum())} tokens of continuation",
        *(
            _residual_note(found[plain], found[repaired])
            for plain, repaired in (("int8-chunk", "int8-chunk-r4"), ("int8-symmetric", "int8-r4"))
            if plain in found and repaired in found
        ),
    )


def _residual_note(plain: tuple[Cell, ...], repaired: tuple[Cell, ...]) -> str:
    """Set what a low-rank residual does beside the article's claim for INT8."""
    scores = [float(str(row[2])) for row in (plain, repaired)]
    return (
        f"low-rank residual, {plain[0]} to {repaired[0]}: attention logits {scores[0]:.2e} to "
        f"{scores[1]:.2e}, ÷ {scores[0] / scores[1]:.2f}; the article says 0.182 to 0.013, ÷ 14"
    )
