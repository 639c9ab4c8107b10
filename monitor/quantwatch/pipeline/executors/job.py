"""What a worker is told, what it answers, and how it opens its part of a night."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from quantwatch.capture.course import Course
from quantwatch.capture.places import REFERENCE
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.shards.partials import Partial
from quantwatch.capture.shards.shard import Shard
from quantwatch.capture.stored.key import ingredients
from quantwatch.domain import Json, Suite
from quantwatch.models.fingerprints import module_sha
from quantwatch.models.loaded import LoadedModel
from quantwatch.pipeline.executors.frames import packed, unpacked
from quantwatch.pipeline.loading import load_one
from quantwatch.pipeline.request import RunRequest


@dataclass(frozen=True, slots=True)
class Job:
    """All that a worker needs. Plain data."""

    request: RunRequest
    candidates: tuple[str, ...]
    """Those that could be loaded."""
    suite: Suite
    plan: CapturePlan
    max_positions: int | None
    threads: int

    @property
    def course(self) -> Course:
        """Its batches, the same in every process."""
        return Course(self.suite, self.plan, self.max_positions)


@dataclass(frozen=True, slots=True)
class Opened:
    """A worker has loaded its models."""

    worker: int
    facts: Json
    """What its numbers depend on."""
    place: str
    """Host and process id."""


@dataclass(frozen=True, slots=True)
class Done:
    """A worker has measured a unit."""

    worker: int
    partial: Partial
    peak_memory_bytes: int
    """Of its process, so far."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker could not load its models, or measure a unit: anybody else could not either."""

    worker: int
    unit: int | None
    error: BaseException


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker's process ended."""

    worker: int
    why: str


Event = Opened | Done | Failed | Lost


def facts_of(models: Mapping[str, LoadedModel], job: Job) -> Json:
    """Return all that can change a bit of what models measure, by name.

    Beside what the reference's numbers depend on: every candidate's fingerprint, and digests of
    values that were computed from texts, which no fingerprint holds.
    """
    found = dict(ingredients(models[REFERENCE], job.course))
    for name, model in models.items():
        prints = model.variant.fingerprint
        found[f"fingerprint of {name}"] = {each: getattr(prints, each) for each in prints.__slots__}
        found[f"dtype of {name}"] = str(model.dtype)
        if model.calibrated_on:
            found[f"values of {name}"] = module_sha(model.module)
    return found


@contextmanager
def opened(job: Job) -> Iterator[tuple[Shard, Json]]:
    """Load the models of a job; yield its shard and what its numbers depend on."""
    torch.set_num_threads(job.threads)
    check = job.request.check
    variants = {REFERENCE: check.reference} | {c.name: c for c in check.candidates}
    names = (REFERENCE, *job.candidates)
    models = {name: load_one(job.request, name, variants[name]) for name in names}
    with Shard(models, job.course) as shard:
        yield shard, facts_of(models, job)


def bare(request: RunRequest) -> RunRequest:
    """Return a request without what only judging needs, and with paths that hold anywhere."""
    base_dir, cache_dir = request.base_dir.absolute(), request.cache_dir.absolute()
    return replace(request, baseline=None, baseline_sums=(), base_dir=base_dir, cache_dir=cache_dir)


def portable(error: BaseException) -> BaseException:
    """Return an exception that survives being sent; of others their type in words."""
    # Whatever an exception's own constructor raises when it is put together again.
    with suppress(Exception):
        if type(unpacked(packed(error))) is type(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def place() -> str:
    """Return host and process id, for people."""
    return f"{os.uname().nodename}:{os.getpid()}"
