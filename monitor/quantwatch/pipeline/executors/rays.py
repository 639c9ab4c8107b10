"""`executor = "ray"`: actors on a Ray cluster, one that is named or one that ends with the run.

An actor holds the models once and measures one unit at a time. Ray may neither restart it nor send
a unit twice: what is measured again is decided here, as for processes of this machine. What actors
return is pickled by us: Ray would hand out views of its own memory that can't be written to.
"""

import sys
from contextlib import ExitStack, redirect_stdout
from typing import Any

from quantwatch.pipeline.executors.frames import packed, unpacked
from quantwatch.pipeline.executors.job import (
    Done,
    Event,
    Failed,
    Job,
    Lost,
    Opened,
    opened,
    place,
    portable,
)
from quantwatch.pipeline.executors.ray_cluster import (
    SILENT,
    gpus_of,
    join,
    require_ray,
    require_room,
    room_of,
)
from quantwatch.pipeline.executors.sharding import Sharding
from quantwatch.pipeline.reasons import peak_memory_bytes

_STORE_BYTES = 256 << 20
"""What a cluster of one's own keeps objects in: jobs, and partials on their way."""


class RayShard:
    """What runs in an actor. Each method returns a pickled event."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._stack = ExitStack()
        self._shard: Any = None

    def open(self, job: bytes) -> bytes:
        """Load the models."""
        try:
            self._shard, facts = self._stack.enter_context(opened(unpacked(job)))
            return packed(Opened(self._worker, facts, place()))
        # Whatever it is: the run ends with it.
        except Exception as error:  # noqa: BLE001
            return packed(Failed(self._worker, None, portable(error)))

    def measure(self, unit: int) -> bytes:
        """Measure a unit."""
        try:
            partial = self._shard.measure(unit)
            return packed(Done(self._worker, partial, peak_memory_bytes()))
        # As if it had been raised where the run is.
        except Exception as error:  # noqa: BLE001
            return packed(Failed(self._worker, unit, portable(error)))


class RayCrew:
    """Actors of one run."""

    def __init__(self, job: Job, sharding: Sharding, most: int) -> None:
        self._ray = require_ray(sharding.address)
        self._owns_cluster = not self._ray.is_initialized()
        self._actors: list[Any] = []
        self._pending: dict[Any, int] = {}
        self._job, self._sharding = job, sharding
        self._gpus = gpus_of(job.request.check)
        self._num_alive = 0
        self._kind: Any = None
        self._data: Any = None
        self._stack = ExitStack()
        # Ray tells of deaths where a document may be printed.
        self._stack.enter_context(redirect_stdout(sys.stderr))
        try:
            self._connect(sharding)
            self._start(most)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Number of actors, dead ones included."""
        return len(self._actors)

    def hire(self) -> int:
        """Start one more actor; return its number. Raises OSError where the cluster has no room."""
        if self._room() <= self._num_alive:
            raise OSError(f"the cluster has room for {self._num_alive} workers now")
        return self._hire()

    def give(self, worker: int, unit: int) -> None:
        """Have an actor measure a unit."""
        self._pending[self._actors[worker].measure.remote(unit)] = worker

    def wait(self, timeout_s: float) -> Event | None:
        """Return what happened next, None if nothing did in time."""
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        if not ready:
            return None
        worker = self._pending.pop(ready[0])
        try:
            event: Event = unpacked(self._ray.get(ready[0]))
        except self._ray.exceptions.RayError as error:
            first = next(iter(str(error).splitlines()), "")
            self._num_alive -= 1
            return Lost(worker, f"worker {worker} is gone: {type(error).__name__}: {first:.200}")
        return event

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        with self._stack:
            if self._owns_cluster:
                self._ray.shutdown()
                return
            for actor in self._actors:
                self._ray.kill(actor)

    def _connect(self, sharding: Sharding) -> None:
        if not self._owns_cluster:
            return
        if sharding.address is not None:
            join(self._ray, sharding.address)
            return
        self._ray.init(
            address="local",
            num_cpus=sharding.threads * (sharding.num_shards or 1),
            object_store_memory=_STORE_BYTES,
            include_dashboard=False,
            **SILENT,
        )

    def _start(self, most: int) -> None:
        gpus, threads, room = self._gpus, self._sharding.threads, self._room()
        wanted = min(self._sharding.num_shards or room, most)
        require_room(self._sharding, wanted, room, gpus)
        # Ray would run an actor again by itself, and a unit would be counted twice.
        options = {"num_cpus": threads, "num_gpus": gpus, "max_restarts": 0}
        self._kind = self._ray.remote(**options, max_task_retries=0)(RayShard)
        self._data = self._ray.put(packed(self._job))
        for _ in range(wanted):
            self._hire()

    def _hire(self) -> int:
        number = self.size
        self._actors.append(self._kind.remote(number))
        self._num_alive += 1
        self._pending[self._actors[number].open.remote(self._data)] = number
        return number

    def _room(self) -> int:
        return room_of(self._ray, self._sharding.threads, self._gpus)
