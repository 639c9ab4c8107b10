"""`executor = "ray"`: actors on a Ray cluster, one that is named or one that ends with the run.

An actor holds the models once and measures one unit at a time. Ray may neither restart it nor send
a unit twice: what is measured again is decided here, as for processes of this machine. What actors
return is pickled by us: Ray would hand out views of its own memory that can't be written to.
"""

import os
import secrets
import socket
import sys
from contextlib import ExitStack, redirect_stdout
from typing import Any

from quantwatch.config.schema import CheckConfig
from quantwatch.errors import ConfigError
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
from quantwatch.pipeline.executors.sharding import Sharding
from quantwatch.pipeline.reasons import peak_memory_bytes

_CONNECT_S = 10.0
_STORE_BYTES = 256 << 20
"""What a cluster of one's own keeps objects in: jobs, and partials on their way."""
_SILENT: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def require_ray(address: str | None) -> Any:
    """Return the package, told in time how to start a cluster where none is named.

    Whoever reaches a Ray cluster can run code in it: one of our own listens on this machine alone
    and asks for a secret of this run. Raises ConfigError, naming the extra, when it isn't there.
    """
    wanted = dict(_QUIET)
    if address is None:
        # The name is of systems on which that is so anyway.
        wanted["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        wanted |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f'executor = "ray" needs the package ray, which can\'t be imported ({error}): '
            'pip install "quantwatch[ray]"'
        ) from error
    return ray


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
        self._stack = ExitStack()
        # Ray tells of deaths where a document may be printed.
        self._stack.enter_context(redirect_stdout(sys.stderr))
        try:
            self._connect(sharding)
            self._start(job, sharding, most)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Number of actors."""
        return len(self._actors)

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
            _join(self._ray, sharding.address)
            return
        self._ray.init(
            address="local",
            num_cpus=sharding.threads * (sharding.num_shards or 1),
            object_store_memory=_STORE_BYTES,
            include_dashboard=False,
            **_SILENT,
        )

    def _start(self, job: Job, sharding: Sharding, most: int) -> None:
        gpus = gpus_of(job.request.check)
        room = _room(self._ray.cluster_resources(), sharding.threads, gpus)
        wanted = min(sharding.num_shards or room, most)
        _require_room(sharding, wanted, room, gpus)
        # Ray would run an actor again by itself, and a unit would be counted twice.
        options = {"num_cpus": sharding.threads, "num_gpus": gpus, "max_restarts": 0}
        kind = self._ray.remote(**options, max_task_retries=0)(RayShard)
        data = self._ray.put(packed(job))
        self._actors = [kind.remote(number) for number in range(wanted)]
        self._pending = {actor.open.remote(data): n for n, actor in enumerate(self._actors)}


def require_cluster(sharding: Sharding, check: CheckConfig) -> None:
    """Join the cluster that a check names, and leave it: what it would refuse is refused now.

    Raises ConfigError: no package, no cluster, one that can't be joined, or without room.
    """
    ray = require_ray(sharding.address)
    if sharding.address is None or ray.is_initialized():
        return
    # Ray says where it looks for a cluster where a document may be printed.
    with redirect_stdout(sys.stderr):
        require_listener(_found(sharding.address), sharding.address)
        _join(ray, sharding.address)
        try:
            room = _room(ray.cluster_resources(), sharding.threads, gpus_of(check))
            _require_room(sharding, sharding.num_shards or 1, room, gpus_of(check))
        finally:
            ray.shutdown()


def _found(address: str) -> str:
    """Return what Ray takes an address without a scheme for: `auto` is of a variable or a file."""
    if "://" in address:
        return address
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address(address) or address
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(_no_cluster(address, error)) from error


def _join(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, **_SILENT)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(_no_cluster(address, error)) from error


def _no_cluster(address: str, error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"ray_address {address!r}: no cluster can be joined there: {words:.300}"


def require_listener(address: str, named: str) -> None:
    """Raise ConfigError when nobody listens at HOST:PORT: Ray would try for an hour.

    `named` is how the check calls it. Other forms are Ray's own to refuse.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        at = "there" if named == address else f"at {address}"
        raise ConfigError(f"ray_address {named!r}: nobody listens {at}: {error}") from error


def gpus_of(check: CheckConfig) -> int:
    """Return how many GPUs a worker needs."""
    devices = [check.reference.device, *(c.device for c in check.candidates)]
    return int(any(device.startswith("cuda") for device in devices))


def _room(resources: dict[str, float], threads: int, gpus: int) -> int:
    room = int(resources.get("CPU", 0)) // threads
    return min(room, int(resources.get("GPU", 0))) if gpus else room


def _require_room(sharding: Sharding, wanted: int, room: int, gpus: int) -> None:
    if not 1 <= wanted <= room:
        raise ConfigError(
            f"shards = {wanted}: the cluster has room for {room} workers of "
            f"{sharding.threads} CPUs{f' and {gpus} GPU' if gpus else ''} each"
        )
