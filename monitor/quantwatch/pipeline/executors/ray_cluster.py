"""The Ray cluster of a run: the package, who listens, and for how many workers it has room."""

import os
import secrets
import socket
import sys
from contextlib import redirect_stdout
from typing import Any

from quantwatch.config.schema import CheckConfig
from quantwatch.errors import ConfigError
from quantwatch.pipeline.executors.sharding import Sharding

SILENT: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
"""What a driver is told when it joins."""
_CONNECT_S = 10.0
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
        join(ray, sharding.address)
        try:
            room = room_of(ray, sharding.threads, gpus_of(check))
            require_room(sharding, sharding.num_shards or 1, room, gpus_of(check))
        finally:
            ray.shutdown()


def _found(address: str) -> str:
    """Return what Ray takes an address without a scheme for: `auto` is of a variable or a file."""
    if "://" in address:
        return address
    try:
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:  # of another release: `join` refuses it in Ray's own time
        return address
    try:
        return canonicalize_bootstrap_address(address) or address
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(_no_cluster(address, error)) from error


def join(ray: Any, address: str) -> None:
    """Join a cluster. Raises ConfigError when there is none or it refuses."""
    try:
        ray.init(address=address, **SILENT)
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


def room_of(ray: Any, threads: int, gpus: int) -> int:
    """Return for how many workers the nodes that are there have room, busy ones included."""
    resources = ray.cluster_resources()
    room = int(resources.get("CPU", 0)) // threads
    return min(room, int(resources.get("GPU", 0))) if gpus else room


def require_room(sharding: Sharding, wanted: int, room: int, gpus: int) -> None:
    """Raise ConfigError unless so many workers, at least one, have room."""
    if not 1 <= wanted <= room:
        raise ConfigError(
            f"shards = {wanted}: the cluster has room for {room} workers of "
            f"{sharding.threads} CPUs{f' and {gpus} GPU' if gpus else ''} each"
        )
