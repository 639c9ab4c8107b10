"""What /metrics says: this process's counters, and figures that must be right across processes."""

import math
import threading
import time
from collections.abc import Callable

from prometheus_client import generate_latest

from quantwatch.errors import QuantwatchError
from quantwatch.observability import logs, meters
from quantwatch.store.figures import Figures, read_figures
from quantwatch.store.session import Database

CACHED_S = 5.0
log = logs.get(__name__)


class Exposition:
    """Renders the registry; the database is asked at most every few seconds."""

    def __init__(
        self,
        db: Database,
        worst_layers: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._db, self._worst_layers, self._clock = db, worst_layers, clock
        self._lock = threading.Lock()
        self._text: tuple[float, bytes] | None = None

    def render(self) -> bytes:
        """Return the exposition in Prometheus' text format.

        When the database can't be read, its figures are left out and `quantwatch_database_up` is 0.
        """
        with self._lock:
            moment = self._clock()
            if self._text is None or moment - self._text[0] >= CACHED_S:
                self._refresh()
                self._text = moment, generate_latest(meters.REGISTRY)
            return self._text[1]

    def _refresh(self) -> None:
        try:
            figures = read_figures(self._db, self._worst_layers())
        except QuantwatchError as error:
            log.warning("metrics without the database", why=str(error))
            figures = None
        meters.DATABASE_UP.set(figures is not None)
        show(figures)


def show(figures: Figures | None) -> None:
    """Put figures into the meters; None takes away what was shown before."""
    for meter in (meters.LAST_SUCCESS, meters.ALERTS, meters.KL, meters.LAYER_KL):
        meter.clear()
    # Nothing is 0 because it is not known: every comparison with NaN is false.
    meters.OLDEST_PENDING.set(math.nan if figures is None else figures.oldest_pending_s)
    meters.DB_SIZE.set(math.nan if figures is None else figures.db_size_bytes)
    disk = None if figures is None else figures.disk
    meters.STORAGE_FREE.set(math.nan if disk is None else disk.free_ratio)
    meters.STORAGE_FREE_BYTES.set(math.nan if disk is None else disk.free)
    tick = None if figures is None else figures.last_tick
    meters.LAST_TICK.set(math.nan if tick is None else tick)
    if figures is not None:
        _show_series(figures)


def _show_series(figures: Figures) -> None:
    for check, moment in figures.last_success.items():
        meters.LAST_SUCCESS.labels(check=check).set(moment.timestamp())
    for severity, state in ((s, t) for s in ("warning", "critical") for t in _STATES):
        number = figures.open_alerts.get((severity, state), 0)
        meters.ALERTS.labels(severity=severity, state=state).set(number)
    for reading in figures.kl:
        meters.KL.labels(check=reading.check, variant=reading.candidate, stat=reading.name).set(
            reading.value
        )
    for reading in figures.layers:
        meters.LAYER_KL.labels(
            check=reading.check, variant=reading.candidate, layer=reading.name
        ).set(reading.value)


_STATES = ("pending", "firing", "recovering")
