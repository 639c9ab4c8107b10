"""Inputs and twins of attention: pages of keys and values, scores from codes, a cache's rows.

Attention's twin is float64, each query over its own keys. Outputs are measured against Σ p·|v|, and
against what the scores' rounding may move there; log-sum-exps against the size of their largest
score. Slots behind a sequence's end hold NaN, and page 0 belongs to nobody.

Scores from codes are measured against the sum of the sizes of all terms. A cache's codes, scales
and zeros are defined in float32 and float16, so every back end must give the same bits.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from quantwatch_kernels.conformance.case import LAYOUTS, Ask, Made, OpCase
from quantwatch_kernels.quantize.recipe import WeightSpec
from quantwatch_kernels.serve.int8_qk import INT8_QK, Coded
from quantwatch_kernels.serve.kv_codes import KV_QUANTIZE
from quantwatch_kernels.serve.kv_scheme import PlaneScheme
from quantwatch_kernels.serve.paged_attention import PAGED_ATTENTION, AttentionRule
from quantwatch_kernels.serve.paged_plan import PagedPlan

__all__ = ["attention_cases"]

_PAGED = ((1, 4, 16), (3, 6, 8), (2, 2, 72), (0, 4, 16))
"""(sequences, query heads, features)"""
_PAGE, _SHARED = 4, 2
_LENGTHS, _QUERIES = (9, 17, 1), (1, 3, 1)
_SCORES = ((1, 5, 16), (17, 70, 64), (3, 2, 72), (2, 3, 1100), (0, 4, 16))
"""(queries, keys, features); the sum of 1,100 products of codes is beyond 2²⁴."""
_ROWS = ((1, 64), (5, 72), (3, 1), (17, 33), (0, 64))
_FLOAT32 = 2.5e-7
"""Of scores, exponentials and sums: twice the largest error measured."""


class _Rule(NamedTuple):
    rule: AttentionRule
    pages_per_part: int | None = None


_RULES = {
    "plain": _Rule(AttentionRule()),
    "window, soft-cap": _Rule(AttentionRule(0.5, 2.0, 5)),
    "parts of 2 pages": _Rule(AttentionRule(window=10), 2),
}
_PLANES = {
    "int8": PlaneScheme(8),
    "int8-symmetric": PlaneScheme(8, symmetric=True),
    "int4": PlaneScheme(4),
    "int4-g32": PlaneScheme(4, group=32),
    "int4-symmetric": PlaneScheme(4, symmetric=True),
}


def attention_cases() -> tuple[OpCase, ...]:
    """Return the cases of attention through pages, of scores from codes, and of a cache's rows."""
    float32 = (torch.float32,)
    paged = (
        OpCase(PAGED_ATTENTION, name, partial(_paged, rule), _within, _PAGED)
        for name, rule in _RULES.items()
    )
    scores = (
        OpCase(INT8_QK, name, partial(_scores, which), _term, _SCORES, float32)
        for name, which in {"plain": (0, 0), "query": (1, 0), "both": (1, 1)}.items()
    )
    rows = (
        OpCase(KV_QUANTIZE, name, partial(_rows, plane.spec), lambda _b, _d: 0.0, _ROWS)
        for name, plane in _PLANES.items()
    )
    return *paged, *scores, *rows


def _within(_backend: str, dtype: torch.dtype) -> float:
    """Return what an output may be off: one rounding of it."""
    return _FLOAT32 + (0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2)


def _term(_backend: str, _dtype: torch.dtype) -> float:
    """Return what a sum of float32 products may be off, relative to Σ|terms|."""
    return 1.4e-7


def _paged(which: _Rule, ask: Ask) -> Made:
    count, heads, features = ask.shape
    lengths, asked = _LENGTHS[:count], _QUERIES[:count]
    counts = [-(-n // _PAGE) for n in lengths]
    shape = (1 + sum(counts), _PAGE, _SHARED, features)
    planes = [_drawn(ask, *shape, seed=seed) for seed in (1, 2)]
    pages, at = [], 1
    for length, needed in zip(lengths, counts, strict=True):
        pages.append(list(range(at + needed - 1, at - 1, -1)))  # backwards in memory
        for plane in planes:
            plane[pages[-1][-1], (length - 1) % _PAGE + 1 :] = torch.nan
        at += needed
    held = [LAYOUTS[ask.layout](plane.to(ask.device)) for plane in planes]
    queries = ask.randn(sum(asked), heads, features, seed=3)
    ints = ([0, *counts], [p for own in pages for p in own], [(n - 1) % _PAGE + 1 for n in lengths])
    indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in ints)
    indptr, starts = indptr.cumsum(0).int(), torch.zeros(count, dtype=torch.int32)
    plan = PagedPlan(indptr, indices, last, starts, _PAGE)
    q_indptr = torch.tensor([0, *asked]).cumsum(0)
    right = _Attention(queries, (held[0], held[1]), which.rule)
    for number, (length, count_q) in enumerate(zip(lengths, asked, strict=True)):
        for rank in range(count_q):
            right.of(int(q_indptr[number]) + rank, pages[number], length - count_q + rank)
    args = (queries, q_indptr, (held[0], held[1]), plan, which.rule, which.pages_per_part)
    return Made(args, *right.made())


class _Attention:
    """float64 outputs and log-sum-exps, one query after another, with what errors are against."""

    def __init__(self, queries: Tensor, pages: tuple[Tensor, Tensor], rule: AttentionRule) -> None:
        self._queries, self._pages, self._rule = queries, pages, rule
        self._out, self._size = (torch.zeros(queries.shape, dtype=torch.float64) for _ in "ab")
        self._lse, self._largest = (
            torch.zeros(queries.shape[:2], dtype=torch.float64) for _ in "ab"
        )

    def of(self, row: int, pages: list[int], position: int) -> None:
        """Add the query of a row, at a position of the sequence that has these pages."""
        first = 0 if self._rule.window is None else max(0, position + 1 - self._rule.window)
        keys, values = (
            torch.stack([p[pages[j // _PAGE], j % _PAGE] for j in range(first, position + 1)])
            .double()
            .cpu()
            for p in self._pages
        )
        groups = self._queries.shape[1] // _SHARED
        for head in range(self._queries.shape[1]):
            q, own = self._queries[row, head].double().cpu(), head // groups
            scaling = self._rule.scaling or 1 / math.sqrt(len(q))
            scores, sizes = (x @ y for x, y in ((keys[:, own], q), (keys[:, own].abs(), q.abs())))
            scores = scores * scaling
            if self._rule.softcap is not None:
                scores = self._rule.softcap * torch.tanh(scores / self._rule.softcap)
            # Where the result is rounded to 16 bits, float32's part of what is allowed is less.
            rounding = (1 + scaling * sizes.max()) * _FLOAT32 / _within("", self._queries.dtype)
            shares, mine = scores.softmax(0), values[:, own]
            self._out[row, head] = shares @ mine
            self._size[row, head] = (shares @ mine).abs() + rounding * (shares @ mine.abs())
            self._lse[row, head], self._largest[row, head] = scores.logsumexp(0), rounding

    def made(self) -> Any:
        """Return values and scales."""
        device = self._queries.device
        values = tuple(x.to(device) for x in (self._out, self._lse))
        return values, tuple(x.to(device) for x in (self._size, self._largest))


def _drawn(ask: Ask, *shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed)).to(ask.dtype)


def _scores(residuals: tuple[int, int], ask: Ask) -> Made:
    queries, keys, features = ask.shape
    plain = ask.randn(1, 2, queries, features, seed=1)
    k = ask.randn(1, 2, keys, features, seed=2)
    coded = [_coded(x.cpu(), bool(rest)) for x, rest in zip((plain, k), residuals, strict=True)]
    # Only floats are laid out anew: there is no integer that poisons.
    (q_codes, q_scales, q_rest), (k_codes, k_scales, k_rest) = coded
    terms = [((q_codes.double() * q_scales), (k_codes.double() * k_scales))]
    if q_rest is not None:
        terms.append((q_rest.double(), k_codes.double() * k_scales))
    if k_rest is not None:
        terms.append((plain.cpu().double(), k_rest.double()))
    value = torch.stack([a @ b.mT for a, b in terms]).sum(0)
    size = torch.stack([a.abs() @ b.abs().mT for a, b in terms]).sum(0)
    made = [
        Coded(
            codes.to(ask.device),
            scales.float().to(ask.device),
            None if rest is None else LAYOUTS[ask.layout](rest.to(ask.device)),
        )
        for codes, scales, rest in coded
    ]
    return Made((*made, plain), (value.to(ask.device),), (size.to(ask.device),))


def _coded(x: Tensor, rest: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes, float64 scales of float32 and the float16 residual, by the declared rule."""
    scales = x.abs().amax(-1, keepdim=True) / 127
    codes = (x / scales).round().clamp(-127, 127)
    residual = (x - codes * scales).half() if rest else None
    return codes.to(torch.int8), scales.double(), residual


def _rows(spec: WeightSpec, ask: Ask) -> Made:
    x = ask.randn(*ask.shape, seed=4)
    columns = ask.shape[1]
    size = min(columns, spec.granularity.group_size(columns))
    found = [_group(part, spec) for part in torch.split(x.float().cpu(), size, -1)]
    codes = torch.cat([each[0] for each in found], -1)
    if spec.format.bits == 4:
        codes = torch.nn.functional.pad(codes & 15, (0, columns % 2))
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    packed = (codes & 255).to(torch.uint8)
    parts = [packed, torch.cat([each[1] for each in found], -1)]
    if spec.zero != "none":
        parts.append(torch.cat([each[2] for each in found], -1).to(torch.uint8))
    values = tuple(part.to(ask.device) for part in parts)
    return Made((x, spec), values, tuple(torch.ones_like(v, dtype=torch.float64) for v in values))


def _group(x: Tensor, spec: WeightSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, float16 scales and zeros of one group of each row, by the declared rule."""
    top = spec.format.qmax
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    if spec.zero == "none":
        scales = (torch.maximum(-low, high) / top).half()
        codes = (x / scales.float()).round().clamp(spec.format.qmin, top)
        return codes.int(), scales, torch.zeros_like(low)
    scales = (high / top - low / top).half()
    zeros = (-low / scales.float()).round().clamp(0, top)
    short = (low / scales.float() + zeros < -0.5) | (high / scales.float() + zeros > top + 0.5)
    above = torch.nextafter(scales, torch.full_like(scales, torch.inf))
    scales = torch.where(short, above, scales)
    zeros = (-low / scales.float()).round().clamp(0, top)
    return ((x / scales.float()).round() + zeros).clamp(0, top).int(), scales, zeros
