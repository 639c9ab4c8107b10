"""`quantwatch start`: the service, or some of its parts."""

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from quantwatch.cli.session import Session, cache_dir
from quantwatch.errors import ConfigError

if TYPE_CHECKING:
    from quantwatch.service.configuration import Loaded


class Part(StrEnum):
    """A part of the service; each may run alone, on hosts of its own."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    DELIVERY = "delivery"
    METRICS = "metrics"


Parts = Annotated[
    list[Part] | None, typer.Argument(metavar="[PART]...", help="All four when absent.")
]
Device = Annotated[
    list[str] | None,
    typer.Option(help="Measure on this device only (cpu, cuda:0, …). May be repeated."),
]
Standby = Annotated[
    bool, typer.Option("--standby", help="Start although a SQLite file has a scheduler already.")
]


def start(
    context: typer.Context, parts: Parts = None, device: Device = None, standby: Standby = False
) -> None:
    """Run the service: scheduler, worker, delivery and metrics, until SIGTERM or Ctrl-C."""
    from quantwatch.observability import logs
    from quantwatch.service.running import Wishes, serve

    session = Session.of(context)
    logs.configure(logs.wanted_form("json"), everything=True)
    loaded = loaded_file(session)
    devices = tuple(device or own_devices())
    names = tuple(part.value for part in parts or Part)
    wishes = Wishes(names, cache_dir(), devices, standby)
    with session.writer() as database:
        serve(database, loaded, wishes)


def loaded_file(session: Session) -> "Loaded":
    """Return the configuration as the service uses it. Raises ConfigError when there is none."""
    from quantwatch.service.configuration import load

    path = session.find_config()
    if path is None:
        raise ConfigError("the service needs a quantwatch.toml; name one with --config")
    return load(path.absolute())


def own_devices() -> list[str]:
    """Return what this machine can measure on."""
    from quantwatch.observability.visible import cuda_devices

    return ["cpu", *cuda_devices(os.environ)]
