"""What `fill.py` writes beside runs: alerts and who was told, kernels, GPUs, people's decisions."""

import random
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import fill_content as content
from fill_alerts import ENDPOINTS, deliver, evaluate, told
from fill_content import Plan, Story
from sqlalchemy.orm import Session

from quantwatch.config.schema import CheckConfig
from quantwatch.config.service import RetentionConfig
from quantwatch.domain import MODEL
from quantwatch.domain.lifecycle import RunEvent
from quantwatch.store import (
    applied,
    checks,
    components,
    figures,
    kernels,
    leader,
    leases,
    queue,
    schedules,
    silences,
)
from quantwatch.store.attempts import WorkerId
from quantwatch.store.session import Database
from quantwatch.telemetry import canonical_sha, new_run_id

_OPERATORS = ("int4_linear", "w8a8_linear", "hadamard", "quantize_rows", "paged_attention")
_BACKENDS = ("aten", "inductor", "triton")
_LEASE_S = 7 * 86400.0


def noise_floor(layers: int) -> dict[tuple[str, str], float]:
    """Return how far the reference seems to be from itself."""
    found = {("logit_kl", str(MODEL)): 3e-7, ("top1_agreement", str(MODEL)): 0.0}
    for i in range(layers):
        found["lens_kl", f"layers.{i}"] = 2e-7 * (1 + i / layers)
        found["rel_error", f"layers.{i}"] = 4e-6 * (1 + i / layers)
    return found


def usage(rng: random.Random, age: int) -> tuple[int, dict[str, Any]]:
    """Return peak memory and GPU telemetry of a run, as the worker keeps them."""
    load = 62 + 20 * rng.random()
    card = {
        "name": "NVIDIA L4",
        "memory_used_bytes": {"mean": 9.1e9, "min": 2.1e9, "max": 11.4e9 + 1e8 * rng.random()},
        "memory_total_bytes": {"mean": 24.2e9, "min": 24.2e9, "max": 24.2e9},
        "utilisation_percent": {"mean": load, "min": 0.0, "max": 100.0},
        "temperature_celsius": {"mean": 61.0, "min": 44.0, "max": 68.0 + 6 * rng.random()},
        "sm_clock_mhz": {"mean": 1890.0, "min": 210.0, "max": 2040.0},
        "power_watts": {"mean": 54.0, "min": 12.0, "max": 72.0},
        "ecc_uncorrected": {"during": 0.0, "total": 0.0},
        "throttle_reasons": ["power cap"] if age % 17 == 3 else [],
    }
    driver = content.environment_at(age, 365, 0)["gpus"][0]["driver"]
    return int(4.2e9 + 3e8 * rng.random()), {"driver": driver, "gpus": {"GPU-00000000": card}}


def apply_endpoints(session: Session) -> None:
    """Let the service know its receivers and settings, without secrets."""
    applied.apply_endpoints(session, {name: canonical_sha([name]) for name in ENDPOINTS})
    documents: dict[str, Any] = {f"endpoint:{name}": {"kind": "webhook"} for name in ENDPOINTS}
    documents["service"] = {"devices": ["cuda:0"], "port": 8500}
    documents["retention"] = RetentionConfig(token_runs=14, statistics="400d").model_dump(
        mode="json"
    )
    applied.apply_settings(session, documents)


def fill(
    db: Database,
    plan: Plan,
    stories: Sequence[Story],
    configs: Mapping[str, CheckConfig],
    now: datetime,
) -> None:
    """Write what follows from the nights, in the order in which it happened."""
    rng = random.Random(plan.seed + 1)
    for each in sorted(told(plan, stories, now), key=lambda one: one.at):
        db.clock_shift = each.at - now
        with db.writer() as session:
            each.tell(session, rng)
        db.clock_shift = min(each.at + timedelta(minutes=2) - now, timedelta())
        with db.writer() as session:
            deliver(session, rng)
    db.clock_shift = timedelta()
    with db.writer() as session:
        evaluate(session, now)
    _schedule(db, stories, now)
    _decide(db, stories)
    _start(db, stories, configs)
    _kernels(db, now, rng)
    leader.acquire(db, "gpu-1/scheduler")
    with db.writer() as session:
        _parts(session, now)


def _schedule(db: Database, stories: Sequence[Story], now: datetime) -> None:
    """Let every schedule wait for tomorrow's night, as a scheduler leaves it."""
    with db.writer() as session:
        states = schedules.states_by_check(session)
        for story in stories:
            last, following = (content.night_at(story, age, now) for age in (0, -1))
            schedules.advance(session, states[story.name], last, following, following)


def _decide(db: Database, stories: Sequence[Story]) -> None:
    """Do what people did: pause, silence."""
    for story in stories:
        if story.trouble == "paused":
            checks.pause(db, story.name, "lee", "the reference is re-exported until Thursday")
    with db.writer() as session:
        matcher = {"check": f"{stories[0].name}*", "severity": "warning"}
        silences.add_silence(session, matcher, timedelta(days=2), "lee", "new calibration data")


def _start(db: Database, stories: Sequence[Story], configs: Mapping[str, CheckConfig]) -> None:
    """Let one check run at this moment, and another one wait for it."""
    for story in sorted(stories, key=lambda each: each.trouble == "queued"):
        if story.trouble not in ("running", "queued"):
            continue
        new = queue.NewRun.of(
            story.name, configs[story.name], "/srv/quantwatch", f"m:{new_run_id()}", actor="dana"
        )
        with db.writer() as session:
            queue.enqueue(session, new)
        if story.trouble == "running":
            with db.writer() as session:
                me = WorkerId("worker-1", "gpu-1", 4242)
                held = leases.claim(session, me, ["cpu"], lease_s=_LEASE_S)
            if held is not None:
                for event in (RunEvent.PREPARE, RunEvent.MEASURE):
                    leases.advance(db, held, event)
                leases.heartbeat(db, held, leases.Report("measuring", 5_632, 12_288))


def _kernels(db: Database, now: datetime, rng: random.Random) -> None:
    """Test and time the kernels once a week."""
    for week in range(12, -1, -1):
        at = now - timedelta(days=7 * week + 1)
        environment = content.environment_at(7 * week, 365, 0)
        cases = list(_cases(week, rng))
        counts = [sum(c.status == s for c in cases) for s in ("passed", "failed", "not applicable")]
        whole = kernels.KernelBatch(
            new_run_id(), "test", "cuda", environment["git_commit"], environment, at,
            at + timedelta(minutes=4), *counts,
        )  # fmt: skip
        kernels.insert_cases(db, whole, cases)
        bench = kernels.KernelBatch(
            new_run_id(), "bench", "cuda", environment["git_commit"], environment,
            at + timedelta(minutes=5), at + timedelta(minutes=9),
        )  # fmt: skip
        kernels.insert_speeds(db, bench, list(_speeds(rng)))


def _cases(week: int, rng: random.Random) -> Iterator[kernels.KernelCase]:
    for operator in _OPERATORS:
        for backend in _BACKENDS:
            for size in (256, 576, 4096):
                absent = backend == "triton" and operator == "hadamard"
                broken = operator == "w8a8_linear" and backend == "triton" and week < 2
                error = None if absent else 0.03 if broken else 2e-4 * (1 + rng.random())
                status = "not applicable" if absent else "failed" if broken else "passed"
                words = "error 0.03 is above 0.002" if broken else ""
                yield kernels.KernelCase(
                    operator, backend, "g64", (16, size, size), "bfloat16", "contiguous",
                    status, error, 2e-3, words, (),
                )  # fmt: skip


def _speeds(rng: random.Random) -> Iterator[kernels.KernelSpeed]:
    for operator in _OPERATORS:
        for backend in _BACKENDS:
            ratio = {"aten": 0.6, "inductor": 1.3, "triton": 2.1}[backend] * (
                0.95 + 0.1 * rng.random()
            )
            yield kernels.KernelSpeed(
                operator, backend, "g64", (16, 4096, 4096), "bfloat16", ratio, ratio * 0.97,
                ratio * 1.03, 1e-3 / ratio, 1e-3, 20, 1, "",
            )  # fmt: skip


def _parts(session: Session, now: datetime) -> None:
    """Say that the service is up."""
    parts = (
        ("scheduler", {"epoch": 3, figures.LAST_TICK: now.timestamp()}),
        ("worker", {"devices": ["cuda:0"], "run": None}),
        ("delivery", {}),
    )
    for kind, details in parts:
        part = components.Component(f"gpu-1/{kind}", kind, "gpu-1", 4242)
        components.note_seen(session, part, details)
