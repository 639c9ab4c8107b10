"""Models' errors, invented: 30 layers, a planted fault, seeded noise. No model is run."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from quantwatch.domain import (
    MODEL,
    NonFinite,
    Observation,
    Prompt,
    Scope,
    Suite,
    TokenMatrix,
    TopLogits,
    Verdict,
)

FAULT = Scope("layers.14.mlp.down_proj")
NUM_TOKENS = 4_900
"""Size of the vocabulary: the token after its end is padding of the head."""
UNSEEN = NUM_TOKENS - 1
"""A token id that no prompt contains."""
PARTS = ("attention", "mlp", "mlp.down_proj")
START = datetime(2026, 11, 1, 3, 0, tzinfo=UTC)
TEXT = (
    "The",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    ",",
    "and",
    "the",
    "<script>alert(1)</script>",
    "costs",
    "$5$",
    "or",
    ":red[more]",
    "&",
    "**bold**",
    "[x](javascript:alert(1))",
    "数学",
    "def",
    "f",
    "(",
    "x",
    ")",
    ":",
    "return",
    "x",
    "+",
    "1",
)


@dataclass(frozen=True)
class Candidate:
    """What to invent: `level` is the size of its errors; NaN from `nan_layer` on."""

    name: str
    level: float
    verdict: Verdict | None = Verdict.PASS
    fault: Scope | None = None
    nan_layer: int | None = None
    bits: float = 8.0
    failure: str | None = None
    estimated: bool = False
    """Whether its per-layer KL is estimated beside the sample, 2 % too high."""


DEMO = (
    Candidate("bf16", 2e-3, bits=16.0),
    Candidate("int8", 8e-3, bits=8.13),
    Candidate("int4-g64", 1.1e-1, Verdict.WARN, bits=4.75),
    Candidate("int8-fault", 8e-3, Verdict.REGRESSION, fault=FAULT, bits=8.13),
)


@dataclass(frozen=True)
class Spec:
    """A run to invent."""

    check: str = "demo"
    run_id: str = "01JDEMO0000000000000000000"
    candidates: tuple[Candidate, ...] = DEMO
    started_at: datetime = START
    num_layers: int = 30
    num_prompts: int = 4
    num_tokens: int = 64
    pieces: tuple[str, ...] = TEXT
    drift: float = 1.0
    store_text: bool = True


def make_suite(spec: Spec) -> Suite:
    prompts = tuple(_prompt(i, spec) for i in range(spec.num_prompts))
    return Suite(
        "core-v1:demo",
        f"{spec.num_layers:02d}{spec.num_prompts:03d}{spec.num_tokens:05d}" + "a" * 54,
        prompts,
        vocabulary=_vocabulary(prompts),
    )


def _vocabulary(prompts: Sequence[Prompt]) -> tuple[str, ...]:
    known = {
        i: piece
        for p in prompts
        if p.pieces
        for i, piece in zip(p.token_ids, p.pieces, strict=True)
    }
    return tuple(known.get(i, f"word{i}") for i in range(NUM_TOKENS)) if known else ()


def _prompt(index: int, spec: Spec) -> Prompt:
    pieces = tuple(
        f" {spec.pieces[(index * 7 + j) % len(spec.pieces)]}" for j in range(spec.num_tokens)
    )
    ids = tuple(_token_id(piece) for piece in pieces)
    return Prompt(
        index,
        ("prose", "code", "chinese", "json")[index % 4],
        "core-v1",
        ids,
        pieces if spec.store_text else (),
        "".join(pieces) if spec.store_text else None,
    )


def _token_id(piece: str) -> int:
    return zlib.crc32(piece.encode()) % UNSEEN


def _scopes(spec: Spec) -> tuple[Scope, ...]:
    middle = [
        f"layers.{i}{part}" for i in range(spec.num_layers) for part in (".attention", ".mlp", "")
    ]
    return tuple(Scope(s) for s in ("embedding", *middle, "final_norm", "head"))


def make_observation(
    spec: Spec, c: Candidate, prompt: Prompt, rng: np.random.Generator
) -> Observation:
    tokens = len(prompt.token_ids)
    scopes = _scopes(spec)
    size = np.array([_propagated(s, c, spec) for s in scopes]) * spec.drift
    errors = (
        size[:, None]
        * rng.lognormal(0, 0.6, (1, tokens))
        * rng.lognormal(0, 0.2, (len(scopes), tokens))
    )
    layers = tuple(s for s in scopes if s.count(".") == 1)
    at = np.sort(rng.choice(tokens, min(tokens, 8), replace=False)).astype(np.int64)
    whole = errors[[scopes.index(s) for s in layers]]
    whole, errors = _poisoned(c, layers, whole), _poisoned(c, scopes, errors)
    lens = np.minimum(whole[:, at] ** 2 * 9, 12)
    modules = tuple(Scope(f"layers.{i}.{part}") for i in range(spec.num_layers) for part in PARTS)
    own = np.array([_isolated(s, c) for s in (*layers, *modules)])[:, None] * rng.lognormal(
        0, 0.1, (1, tokens)
    )
    output = np.minimum(whole[-1:] ** 2 * 12, 14)
    return Observation(
        c.name,
        prompt.index,
        (
            TokenMatrix("logit_kl", (MODEL,), output),
            TokenMatrix("top1_agreement", (MODEL,), (output < 0.8).astype(float)),
            TokenMatrix("nll_reference", (MODEL,), np.full((1, tokens), 3.0)),
            TokenMatrix("nll_candidate", (MODEL,), 3.0 + output / 3),
            TokenMatrix("nll_difference", (MODEL,), output / 3),
            TokenMatrix("topk_logit_deviation_k5", (MODEL,), np.sqrt(output)),
            TokenMatrix("topk_logit_deviation_k5", layers, np.sqrt(lens) * 1.1, at),
            TokenMatrix("topk_logit_deviation_k3", layers, np.sqrt(lens), at),
            TokenMatrix("lens_kl", layers, lens, at),
            TokenMatrix("rel_error", scopes, errors),
            TokenMatrix("headroom_bits", scopes, _headroom(c, scopes, errors)),
            TokenMatrix("isolated_error", (*layers, *modules), own),
            *(_estimates(layers, np.minimum(whole**2 * 9, 12), at) if c.estimated else ()),
        ),
        _top(prompt, output[0], rng),
        NonFinite(Scope(f"layers.{c.nan_layer}"), prompt.index, 3)
        if c.nan_layer is not None
        else None,
    )


def _estimates(
    layers: tuple[Scope, ...], exact: NDArray[np.float64], at: NDArray[np.int64]
) -> tuple[TokenMatrix, ...]:
    estimated = exact * 1.02
    everywhere = np.arange(exact.shape[1])
    return (
        TokenMatrix("lens_kl", layers, estimated, everywhere, "extra"),
        TokenMatrix("lens_kl_estimated", layers, estimated),
        TokenMatrix("lens_kl_error", layers, 1 - 1 / np.full(exact[:, at].shape, 1.02), at),
        TokenMatrix("lens_kl_difference", layers, (estimated - exact)[:, at], at),
    )


def _propagated(scope: str, c: Candidate, spec: Spec) -> float:
    index = {"embedding": 0, "final_norm": spec.num_layers, "head": spec.num_layers}.get(scope)
    index = int(scope.split(".")[1]) + 1 if index is None else index
    if scope == "embedding" and c.level < 1e-2:
        return 0.0
    fault = 0.12 if c.fault is not None and index > 14 else 0.0
    return c.level * (0.4 + 0.6 * index / spec.num_layers) + fault


def _headroom(
    c: Candidate, scopes: Sequence[str], errors: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Bits up to the dtype's largest value: little where a fault makes values large."""
    spread = 14 - 3 * np.tanh(np.nan_to_num(errors, nan=0.0) * 4)
    spread[[s.startswith("layers.14") for s in scopes]] -= 4 if c.fault is not None else 0
    return np.where(np.isnan(errors), -np.inf, spread)


def _isolated(scope: str, c: Candidate) -> float:
    wave = 1 + 0.2 * math.sin(sum(map(ord, scope)))
    hit = c.fault is not None and (scope == c.fault or c.fault.startswith(f"{scope}."))
    return c.level * wave * (17 if hit else 1)


def _poisoned(
    c: Candidate, scopes: Sequence[str], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    if c.nan_layer is None:
        return values
    poisoned = values.copy()
    for row, scope in enumerate(scopes):
        if scope in ("final_norm", "head") or (
            scope[:7] == "layers." and int(scope.split(".")[1]) >= c.nan_layer
        ):
            poisoned[row, 3:] = np.nan
    return poisoned


def _top(prompt: Prompt, output: NDArray[np.float64], rng: np.random.Generator) -> TopLogits:
    n, k = len(output), 10
    known = np.array(prompt.token_ids)
    ids = known[(np.arange(n)[:, None] + np.arange(k)) % len(known)].astype(np.int32)
    ids[:, -2:] = UNSEEN, NUM_TOKENS
    logits = np.sort(rng.normal(12, 3, (n, k)))[:, ::-1].astype(np.float32)
    moved = (
        logits + rng.normal(0, 1, (n, k)) * np.sqrt(np.nan_to_num(output, nan=1.0))[:, None]
    ).astype(np.float32)
    order = np.argsort(-moved, axis=1)
    return TopLogits(
        ids, logits, np.take_along_axis(ids, order, 1), np.take_along_axis(moved, order, 1), moved
    )
