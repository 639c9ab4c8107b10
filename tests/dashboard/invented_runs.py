"""Runs as the pipeline leaves them: aggregated by the real sink, saved by the store's functions."""

import tempfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

import numpy as np
from tests.dashboard.invented import DEMO, START, Candidate, Spec, make_observation, make_suite

from quantwatch.domain import (
    Alert,
    Block,
    CandidateResult,
    Fingerprint,
    RunResult,
    RunStatus,
    Scope,
    Severity,
    Suite,
    Variant,
    Verdict,
)
from quantwatch.metrics.aggregate import Aggregator
from quantwatch.metrics.culprit import find_culprit
from quantwatch.store import runs
from quantwatch.store.session import open_database


def make_run(spec: Spec) -> tuple[RunResult, Suite, list[Block]]:
    """Return a run with its suite and blocks, aggregated by the real sink."""
    content = replace(spec, check="", run_id="", started_at=START)
    suite, candidates, blocks = _measured(content)
    return _result(spec, suite, candidates), suite, list(blocks)


@lru_cache(maxsize=16)
def _measured(spec: Spec) -> tuple[Suite, tuple[CandidateResult, ...], tuple[Block, ...]]:
    """Aggregate once whatever several nights or tests measure alike: nothing takes longer."""
    with tempfile.TemporaryDirectory() as folder:
        return _aggregated(spec, Path(folder))


def _aggregated(
    spec: Spec, folder: Path
) -> tuple[Suite, tuple[CandidateResult, ...], tuple[Block, ...]]:
    suite = make_suite(spec)
    blocks: list[Block] = []
    candidates: list[CandidateResult] = []
    with Aggregator(suite, folder) as sink:
        for number, candidate in enumerate(spec.candidates):
            if candidate.failure is None:
                for prompt in suite.prompts:
                    sink.observe(
                        make_observation(
                            spec,
                            candidate,
                            prompt,
                            np.random.default_rng(number * 100 + prompt.index),
                        )
                    )
                blocks += list(sink.blocks(candidate.name))
            candidates.append(_candidate(candidate, sink))
    return suite, tuple(candidates), tuple(blocks)


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
    result, suite, blocks = make_run(spec)
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
    save_ended(url, Spec(check="chat-int8", run_id="01JF" + "0" * 22, started_at=now - timedelta(minutes=4)),
               RunStatus.FAILED, "model smollm2-135m: not enough memory: 1.2 GB needed, 0.8 GB free")  # fmt: skip
