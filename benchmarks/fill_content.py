"""What `fill.py` writes: invented models, their nights, and the configuration that watches them.

A template is one run of invented errors, aggregated by the real sink, with matrices. A night is its
template with every statistic moved a little; the newest nights are the template itself, so that
their matrices and their statistics agree.
"""

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantwatch.config.parsing import parse
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import (
    Block,
    CandidateResult,
    Json,
    Measurement,
    RunResult,
    Scope,
    Suite,
    Verdict,
)
from quantwatch.store.statistics import STATISTICS

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.dashboard.invented import Candidate, Spec
from tests.dashboard.invented_runs import make_run

NUM_TEMPLATES = 24
"""Checks beyond so many share their models' errors."""
_MODELS = ("qwen3-0.6b", "llama-3.2-1b", "smollm2-135m", "gemma-3-1b", "phi-4-mini", "olmo-2-1b")
_USES = ("chat", "summaries", "search", "code")
_TEAMS = ("search", "assistants", "platform")
_KINDS = (("int8-channel", 8e-3, 8.13), ("int4-g64", 6e-2, 4.75), ("bf16", 2e-3, 16.0))
_KINDS += (("int4-gptq", 4e-2, 4.25), ("fp8-e4m3", 1.2e-2, 8.06), ("int3-g32", 1.1e-1, 3.75))
_SENTENCE = """
A model that answers in production is measured each night against the one it was made from , token
by token and layer by layer ; what changed is said in words .
"""
_UNMOVED = ("nll_reference", "nll_candidate")
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to write. `nights` is counted per check, the newest one is tonight."""

    checks: int
    nights: int
    candidates: int
    layers: int
    block_nights: int
    seed: int


@dataclass(frozen=True, slots=True)
class Story:
    """What happens to one check."""

    index: int
    name: str
    tags: tuple[str, ...]
    trouble: str
    """fine, fault, warn, nan, failed, paused, running, queued or never (no run at all)."""
    worse_since: int | None
    """Night, counted from the newest one (0), from which on its last candidate is worse."""

    def is_worse(self, age: int) -> bool:
        """Say whether the night so long ago is one of the bad ones."""
        return self.worse_since is not None and age <= self.worse_since


@dataclass(frozen=True, slots=True)
class Template:
    """A run with its matrices, and its candidates' statistics as numbers [rows, statistics]."""

    result: RunResult
    suite: Suite
    blocks: Sequence[Block]
    numbers: tuple[NDArray[np.float64], ...]


def stories(plan: Plan) -> list[Story]:
    """Return the checks by name; one in three has something to tell."""
    found = []
    for i in range(plan.checks):
        model, use = _MODELS[i % len(_MODELS)], _USES[(i // len(_MODELS)) % len(_USES)]
        more = i // (len(_MODELS) * len(_USES))
        name = f"{model.replace('.', '-')}-{use}" + (f"-{more + 1}" if more else "")
        tags = (_TEAMS[i % len(_TEAMS)], "production" if i % 4 else "staging")
        trouble = {3: "fault", 5: "warn", 7: "nan", 8: "failed", 11: "paused", 13: "running"}
        trouble |= {16: "queued", 19: "fault"}
        told = trouble.get(i % 20, "fine")
        since = {"fault": 4 + i % 17, "warn": 40, "nan": 1}.get(told)
        found.append(Story(i, name, tags, told, since and min(since, plan.nights - 1)))
    return found


def config_of(plan: Plan, story: Story) -> CheckConfig:
    """Return a check as `quantwatch.toml` would have it."""
    model = _MODELS[story.index % len(_MODELS)]
    candidates = [
        {"name": c.name, "model": model, "recipe": "int4-g64" if c.bits < 8 else "int8-channel"}
        for c in _candidates(plan, story.index, worse=None)
    ]
    document = {
        "description": f"{model}: what production serves against the original",
        "reference": {"model": model},
        "candidates": candidates,
        "suite": "core-v1:demo",
        "tags": list(story.tags),
        "schedule": {"cron": f"{story.index % 60} {1 + story.index % 5} * * *"},
    }
    return parse(CheckConfig, document, f"check {story.name}")


def night_at(story: Story, age: int, now: datetime) -> datetime:
    """Return when the run of the night so long ago began."""
    tonight = now.replace(hour=1 + story.index % 5, minute=story.index % 60, second=0)
    tonight -= timedelta(days=1 if tonight > now - timedelta(minutes=20) else 0)
    return tonight - timedelta(days=age) + timedelta(seconds=story.index * 7 % 50)


def run_id(at: datetime, rng: random.Random) -> str:
    """Return a ULID of that moment."""
    number = (int(at.timestamp() * 1000) << 80) | rng.getrandbits(80)
    return "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))


def environment_at(age: int, nights: int, index: int) -> dict[str, Any]:
    """Return the machine of a night: a new driver, a new torch and a new commit come by."""
    done = 1 - age / max(1, nights)
    driver = "575.57.08" if done < 0.35 else "580.65.06" if done < 0.93 else "580.95.05"
    torch = "2.12.1" if done < 0.8 else "2.13.0"
    return {
        "python": "3.11.7",
        "platform": "Linux-6.8.0-x86_64-with-glibc2.36",
        "libraries": {"torch": torch, "transformers": "5.2.0", "numpy": "2.4.1"},
        "cpu": {"machine": "x86_64", "cores": 16, "threads": 8},
        "gpus": [{"uuid": f"GPU-{index % 4:08x}", "name": "NVIDIA L4", "driver": driver}],
        "git_commit": f"{0x51A9E000 + int(done * 12):x}",
    }


@cache
def template(plan: Plan, index: int, worse: str | None) -> Template:
    """Return the models' errors of a check, aggregated by the real sink."""
    index %= NUM_TEMPLATES
    candidates = _candidates(plan, index, worse)
    spec = Spec(
        candidates=candidates, num_layers=plan.layers, num_prompts=6, num_tokens=48,
        pieces=tuple(_SENTENCE.split()),
    )  # fmt: skip
    result, suite, blocks = make_run(spec)
    return Template(result, suite, blocks, tuple(_numbers(c) for c in result.candidates))


def moved(found: Template, rng: np.random.Generator, drift: float) -> tuple[CandidateResult, ...]:
    """Return the candidates of another night: every statistic a little different."""
    return tuple(
        replace(candidate, measurements=_moved(candidate, numbers, rng, drift))
        for candidate, numbers in zip(found.result.candidates, found.numbers, strict=True)
    )


def _moved(
    candidate: CandidateResult, numbers: NDArray[np.float64], rng: np.random.Generator, drift: float
) -> tuple[Measurement, ...]:
    night = drift * rng.lognormal(0, 0.03)
    factors = night * rng.lognormal(0, 0.02, len(numbers))
    rows = candidate.measurements
    for i, row in enumerate(rows):
        if row.scope != "model":
            break
        factors[i] = 1.0 if row.metric in _UNMOVED else night
    values = (numbers * factors[:, None]).tolist()
    return tuple(_row(row, new) for row, new in zip(rows, values, strict=True))


def _row(row: Measurement, new: list[float]) -> Measurement:
    if row.metric == "top1_agreement":
        new = [min(value, 1.0) for value in new]
    finite = [None if math.isnan(value) else value for value in new]
    return Measurement(
        row.metric, row.scope, row.n, row.n_nan, row.n_posinf, row.n_neginf, row.n_missing,
        *finite, row.max_prompt, row.max_position, row.method,
    )  # fmt: skip


def _numbers(candidate: CandidateResult) -> NDArray[np.float64]:
    rows = [[getattr(row, name) for name in STATISTICS] for row in candidate.measurements]
    return np.array(rows, dtype=np.float64)


def _candidates(plan: Plan, index: int, worse: str | None) -> tuple[Candidate, ...]:
    """Return the candidates of a check; the last one is the one that becomes worse."""
    size = 0.7 + 0.6 * ((index * 7919) % 100) / 100
    found = []
    for i in range(plan.candidates):
        name, level, bits = _KINDS[i % len(_KINDS)]
        suffix = f"-{i // len(_KINDS) + 1}" if i >= len(_KINDS) else ""
        found.append(Candidate(f"{name}{suffix}", level * size, bits=bits))
    if worse is not None:
        found[-1] = _worse(found[-1], worse, plan.layers)
    return tuple(found)


def _worse(candidate: Candidate, how: str, layers: int) -> Candidate:
    if how == "nan":
        return replace(candidate, nan_layer=layers // 2, verdict=Verdict.REGRESSION)
    if how == "warn":
        return replace(candidate, level=candidate.level * 1.8, verdict=Verdict.WARN)
    place = Scope(f"layers.{min(14, layers - 1)}.mlp.down_proj")
    return replace(candidate, fault=place, verdict=Verdict.REGRESSION)


def details(config: CheckConfig) -> Json:
    """Return a check's configuration as runs and the service keep it."""
    return config.model_dump(mode="json")


def present() -> datetime:
    """Return now, to the second."""
    return datetime.now(UTC).replace(microsecond=0)
