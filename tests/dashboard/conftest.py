"""A run as the pipeline leaves it, without a model: 30 layers, a planted fault, real aggregation."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import streamlit as st
from numpy.typing import NDArray

from quantwatch.domain import (
    MODEL, Alert, Block, CandidateResult, Fingerprint, NonFinite, Observation, Prompt, RunResult,
    RunStatus, Scope, Severity, Suite, TokenMatrix, TopLogits, Variant, Verdict,
)  # fmt: skip
from quantwatch.metrics.aggregate import Aggregator
from quantwatch.metrics.culprit import find_culprit
from quantwatch.store import runs
from quantwatch.store.session import open_database
from quantwatch.store.upgrade import upgrade

FAULT = Scope("layers.14.mlp.down_proj")
PARTS = ("attention", "mlp", "mlp.down_proj")
START = datetime(2026, 11, 1, 3, 0, tzinfo=UTC)
TEXT = (
    "The quick brown fox jumps over the lazy dog , and the <script>alert(1)</script> costs $5$ or "
    ":red[more] & **bold** [x](javascript:alert(1)) 数学 def f ( x ) : return x + 1"
).split()


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
    candidates: Sequence[Candidate] = DEMO
    started_at: datetime = START
    num_layers: int = 30
    num_prompts: int = 4
    num_tokens: int = 64
    pieces: Sequence[str] = field(default_factory=lambda: TEXT)
    drift: float = 1.0


def make_suite(spec: Spec) -> Suite:
    prompts = tuple(_prompt(i, spec) for i in range(spec.num_prompts))
    return Suite(
        "core-v1:demo",
        f"{spec.num_layers:02d}{spec.num_prompts:03d}{spec.num_tokens:05d}" + "a" * 54,
        prompts,
    )


def _prompt(index: int, spec: Spec) -> Prompt:
    pieces = tuple(
        f" {spec.pieces[(index * 7 + j) % len(spec.pieces)]}" for j in range(spec.num_tokens)
    )
    ids = tuple(abs(hash_of(piece)) for piece in pieces)
    return Prompt(
        index,
        ("prose", "code", "chinese", "json")[index % 4],
        "core-v1",
        ids,
        pieces,
        "".join(pieces),
    )


def hash_of(piece: str) -> int:
    return sum(ord(char) * 31**k for k, char in enumerate(piece)) % 49_000


def make_run(spec: Spec, folder: Path) -> tuple[RunResult, Suite, list[Block]]:
    """Return a run with its suite and blocks, aggregated by the real sink."""
    suite = make_suite(spec)
    blocks: list[Block] = []
    candidates: list[CandidateResult] = []
    with Aggregator(suite, folder) as sink:
        for number, candidate in enumerate(spec.candidates):
            if candidate.failure is None:
                for prompt in suite.prompts:
                    sink.observe(
                        _observation(
                            spec,
                            candidate,
                            prompt,
                            np.random.default_rng(number * 100 + prompt.index),
                        )
                    )
                blocks += list(sink.blocks(candidate.name))
            candidates.append(_candidate(candidate, sink))
    return _result(spec, suite, tuple(candidates)), suite, blocks


def _scopes(spec: Spec) -> tuple[Scope, ...]:
    middle = [
        f"layers.{i}{part}" for i in range(spec.num_layers) for part in (".attention", ".mlp", "")
    ]
    return tuple(Scope(s) for s in ("embedding", *middle, "final_norm", "head"))


def _observation(spec: Spec, c: Candidate, prompt: Prompt, rng: np.random.Generator) -> Observation:
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
            TokenMatrix("isolated_error", (*layers, *modules), own),
        ),
        _top(prompt, output[0], rng),
        NonFinite(Scope(f"layers.{c.nan_layer}"), prompt.index, 3)
        if c.nan_layer is not None
        else None,
    )


def _propagated(scope: str, c: Candidate, spec: Spec) -> float:
    index = {"embedding": 0, "final_norm": spec.num_layers, "head": spec.num_layers}.get(scope)
    index = int(scope.split(".")[1]) + 1 if index is None else index
    if scope == "embedding" and c.level < 1e-2:
        return 0.0
    fault = 0.12 if c.fault is not None and index > 14 else 0.0
    return c.level * (0.4 + 0.6 * index / spec.num_layers) + fault


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
    logits = np.sort(rng.normal(12, 3, (n, k)))[:, ::-1].astype(np.float32)
    moved = (
        logits + rng.normal(0, 1, (n, k)) * np.sqrt(np.nan_to_num(output, nan=1.0))[:, None]
    ).astype(np.float32)
    order = np.argsort(-moved, axis=1)
    return TopLogits(
        ids, logits, np.take_along_axis(ids, order, 1), np.take_along_axis(moved, order, 1), moved
    )


def _candidate(c: Candidate, sink: Aggregator) -> CandidateResult:
    if c.failure is not None:
        return CandidateResult(c.name, None, None, failure=c.failure)
    rows = sink.measurements(c.name)
    found = sink.first_nonfinite(c.name)
    culprit = find_culprit(rows, floor={}, first_nonfinite=found)
    return CandidateResult(c.name, _variant(c.name, c.bits), c.verdict, rows, culprit, found)


def _variant(name: str, bits: float) -> Variant:
    digests = Fingerprint("ab" * 32, "cd" * 32, "ef" * 32, "", "", "")
    execution = "bfloat16" if bits == 16 else "dequantized" if bits < 16 else "float32"
    return Variant(
        name, digests, execution, int(134.5e6 * bits / 8), bits, {"model": "smollm2-135m"}
    )


def _alerts(spec: Spec) -> tuple[Alert, ...]:
    found = [
        Alert("isolated-error-outlier", c.name, "isolated_error", "mean", Scope("layers.14"), 0.136, "finite", 0.024,
              Severity.CRITICAL, "isolated_error.mean at layers.14 is 17 × the median over layers (limit 3 ×)")
        for c in spec.candidates if c.fault is not None
    ]  # fmt: skip
    found += [
        Alert("layer-kl", c.name, "lens_kl", "mean", Scope(f"layers.{i}"), 0.19, "finite", 0.15, Severity.WARNING,
              f"lens_kl.mean at layers.{i} = 0.19 is above 0.15")
        for c in spec.candidates if c.verdict == Verdict.WARN for i in (28, 29)
    ]  # fmt: skip
    found += [
        Alert("nonfinite", c.name, "rel_error", "mean", Scope(f"layers.{c.nan_layer}"), None, "nan", 0.0,
              Severity.CRITICAL, "values are not finite")
        for c in spec.candidates if c.nan_layer is not None
    ]  # fmt: skip
    return tuple(found)


def _result(spec: Spec, suite: Suite, candidates: tuple[CandidateResult, ...]) -> RunResult:
    verdicts = [c.verdict for c in candidates if c.verdict is not None]
    return RunResult(
        spec.run_id, spec.check, RunStatus.SUCCEEDED, Verdict.worst(verdicts) if verdicts else None,
        spec.started_at, spec.started_at + timedelta(seconds=163), suite.name, suite.hash, suite.num_tokens,
        len(suite.prompts), _variant("reference", 32.0), "9f" * 32, 1,
        {"torch": "2.13.0", "threads": 1}, {"rules": []}, candidates, _alerts(spec),
        {("logit_kl", "model"): 3e-9}, {"loading": 8.1, "capture": 120.4}, capture={"num_padding_tokens": 12},
    )  # fmt: skip


def save(url: str, spec: Spec, folder: Path) -> RunResult:
    """Write a run through the store's own functions."""
    result, suite, blocks = make_run(spec, folder)
    database = open_database(url)
    try:
        runs.begin_run(
            database,
            run_id=result.run_id,
            check=result.check,
            config={"rules": []},
            started_at=result.started_at,
        )
        runs.finish_run(database, result, suite, blocks)
    finally:
        database.close()
    return result


def save_ended(url: str, spec: Spec, status: RunStatus, reason: str) -> None:
    """Write a run that failed or was cancelled."""
    database = open_database(url)
    try:
        runs.begin_run(
            database,
            run_id=spec.run_id,
            check=spec.check,
            config={"rules": []},
            started_at=spec.started_at,
        )
        runs.end_run(database, spec.run_id, status, reason)
    finally:
        database.close()


def fill_history(url: str, folder: Path) -> None:
    """Write a demo-like database: three checks, a week of nights, one fault, one failed run."""
    now = datetime.now(UTC).replace(microsecond=0)
    for night in range(7):
        at = now - timedelta(days=6 - night, minutes=12)
        faulty = (
            DEMO if night == 6 else (*DEMO[:3], replace(DEMO[3], fault=None, verdict=Verdict.PASS))
        )
        spec = Spec(
            run_id=f"01JD{night:022d}",
            candidates=faulty,
            started_at=at,
            drift=1 + 0.05 * (night % 3),
        )
        save(url, spec, folder)
        save(
            url,
            replace(spec, check="chat-int8", run_id=f"01JC{night:022d}", candidates=DEMO[:2]),
            folder,
        )
    save_ended(url, Spec(check="chat-int8", run_id="01JF" + "0" * 22, started_at=now - timedelta(minutes=40)),
               RunStatus.FAILED, "model smollm2-135m: not enough memory: 1.2 GB needed, 0.8 GB free")  # fmt: skip


@pytest.fixture
def empty_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty database at the current schema, named in the environment as the CLI does it."""
    url = f"sqlite:///{tmp_path}/quantwatch.db"
    upgrade(url)
    monkeypatch.setenv("QUANTWATCH_DATABASE_URL", url)
    yield url
    st.cache_resource.clear()


@pytest.fixture
def save_run(empty_url: str, tmp_path: Path) -> Callable[[Spec], RunResult]:
    """Write runs into the database that the dashboard reads."""
    return lambda spec: save(empty_url, spec, tmp_path)
