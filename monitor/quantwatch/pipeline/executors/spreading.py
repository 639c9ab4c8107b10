"""From a check's executor to a spread: what can be refused is refused before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from quantwatch.capture.places import REFERENCE
from quantwatch.capture.shards.partials import Spread
from quantwatch.domain import Suite
from quantwatch.models.loaded import LoadedModel
from quantwatch.pipeline.executors.driver import Crew, Driver
from quantwatch.pipeline.executors.job import Job, bare, facts_of
from quantwatch.pipeline.executors.local import LocalCrew
from quantwatch.pipeline.executors.sharding import Sharding, sharding_of
from quantwatch.pipeline.loading import pinned_threads
from quantwatch.pipeline.request import RunRequest


@dataclass(frozen=True, slots=True)
class Spreading:
    """How one run is spread."""

    request: RunRequest
    sharding: Sharding

    @classmethod
    def of(cls, request: RunRequest) -> "Spreading | None":
        """Return how a run is spread, None when this process measures it.

        Raises ConfigError when that can't be: too many threads, no package, no cluster.
        """
        sharding = sharding_of(request.check)
        if sharding is None:
            return None
        if sharding.executor == "ray":
            from quantwatch.pipeline.executors.ray_cluster import require_cluster

            require_cluster(sharding, request.check)
        return cls(request, sharding)

    def over(self, models: Mapping[str, LoadedModel], suite: Suite) -> Spread:
        """Return the spread over a suite; `models` are those that were loaded here."""
        job = Job(
            bare(self.request),
            tuple(name for name in models if name != REFERENCE),
            suite,
            self.request.plan.over(suite),
            models[REFERENCE].max_positions,
            self.sharding.threads,
        )
        with pinned_threads(self.sharding.threads):
            facts = facts_of(models, job)
        notes = list(self.sharding.notes)
        told = {"executor": self.sharding.executor, "threads": job.threads, "notes": notes}
        return Driver(job, facts, partial(self._hire, notes), told)

    def _hire(self, notes: list[str], job: Job, most: int) -> Crew:
        wanted = self.sharding.num_shards
        if wanted is not None and wanted > most:
            notes.append(f"{wanted} shards were asked for; the suite has {most} batches")
        if self.sharding.executor == "ray":
            from quantwatch.pipeline.executors.rays import RayCrew

            return RayCrew(job, self.sharding, most)
        return LocalCrew(job, min(wanted or 1, most))
