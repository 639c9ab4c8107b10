"""The worker: claims one run at a time, has it carried out, and sees that it ends."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from quantwatch.errors import LeaseLostError, QuantwatchError, StoreError
from quantwatch.observability import logs
from quantwatch.store import endings, leases
from quantwatch.store.attempts import Failure, WorkerId
from quantwatch.store.components import Component, note_gone, note_seen
from quantwatch.store.endings import Tell
from quantwatch.store.leases import Claim
from quantwatch.store.reaper import reap
from quantwatch.store.survivors import note_alive
from quantwatch.store.unclaimed import expire
from quantwatch.telemetry import new_run_id
from quantwatch.worker import exits
from quantwatch.worker.accounts import Stopwatch, has_ended_itself, note_reaped
from quantwatch.worker.execution import Execution, Start
from quantwatch.worker.patience import Pace, insist

if TYPE_CHECKING:
    from quantwatch.store.session import Database

log = logs.get(__name__)
Why = Literal["stopped", "cancelled", "overdue", "lost"]


class Worker:
    """One worker of this process. `start` and `stop` for a service, `run_once` for a test."""

    def __init__(
        self,
        database: "Database",
        start: Start,
        *,
        devices: Sequence[str] = ("cpu",),
        pace: Pace | None = None,
        tell: Tell | None = None,
    ) -> None:
        self._database, self._start, self._devices = database, start, tuple(devices)
        self._pace, self._tell = pace or Pace(), tell
        self.id = WorkerId.here(f"worker-{new_run_id()}")
        self._stopping = threading.Event()
        self._give_back_at = float("inf")
        self._run_id: str | None = None
        self._was_away = False
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    name = "worker"
    """What the service calls this part."""

    def start(self) -> None:
        """Begin to work, and to look after runs whose workers are gone."""
        for name, live in (("worker", self._work), ("reaper", self._reap)):
            thread = threading.Thread(target=self._live, args=(live,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def ask_to_stop(self) -> None:
        """Claim nothing any more, and give the run back when it takes too long. Returns at once."""
        if not self._stopping.is_set():
            self._give_back_at = time.monotonic() + self._pace.shutdown_s
            self._stopping.set()

    def stop(self, wait_s: float | None = None) -> None:
        """Ask to stop and wait until the run has ended or is given back, `wait_s` at most."""
        self.ask_to_stop()
        until = None if wait_s is None else time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        self._say_goodbye()

    @property
    def is_alive(self) -> bool:
        """Whether its threads work."""
        return any(thread.is_alive() for thread in self._threads)

    @property
    def failure(self) -> BaseException | None:
        """What it died of; None while it works and after a clean stop."""
        return self._failure

    def _live(self, work: Callable[[], None]) -> None:
        try:
            work()
        # Whatever it is, the service ends with it rather than limp on.
        except BaseException as error:  # noqa: BLE001
            log.error("worker died", error)  # noqa: PLE1205 - no logging.Logger
            self._failure = error
            self.ask_to_stop()

    def run_once(self) -> bool:
        """Carry out the next run that may start, to its end; say whether there was one."""
        with self._database.writer() as session:
            claim = leases.claim(session, self.id, self._devices, lease_s=self._pace.lease_s)
        if claim is None:
            return False
        log.info("run claimed", run=claim.run_id, check=claim.check, attempt=claim.attempt)
        self._run_id, watch = claim.run_id, Stopwatch(claim)
        try:
            if self._attend(claim) != "lost":
                # Otherwise it is counted by whoever ended it.
                watch.note(self._database)
        finally:
            self._run_id = None
        return True

    def _work(self) -> None:
        with self._database.kept_open():
            while not self._stopping.is_set():
                try:
                    if self.run_once():
                        continue
                except QuantwatchError as error:
                    log.warning("worker can't claim, or end a run", reason=str(error))
                self._stopping.wait(self._pace.poll_s)

    def _attend(self, claim: Claim) -> Why | None:
        """Have a run carried out; return why it was ended from here, None when it ended itself."""
        try:
            execution = self._start(claim)
        except OSError as error:
            failure = Failure("internal", f"no process could be started: {error}", "OSError", True)
            self._insist(lambda: endings.fail(self._database, claim, failure, self._tell), claim)
            return None
        why = self._watch(claim, execution)
        if why == "lost" and has_ended_itself(self._database, claim):
            # Nobody took it away: its process only takes its time to go.
            why = None
        if why is not None:
            log.info("run is stopped", run=claim.run_id, reason=why)
        if not execution.ended.is_set():
            execution.kill()
            execution.ended.wait()
        self._insist(lambda: self._close(claim, execution.code(), why), claim)
        return why

    def _insist(self, write: Callable[[], object], claim: Claim) -> None:
        """Outlast a database that is away: whoever else ends the run takes it for a death."""
        insist(write, claim, self._stopping)

    def _watch(self, claim: Claim, execution: Execution) -> Why | None:
        """Wait for the end; return why it should be brought about, None when it came by itself."""
        lost_since: float | None = None
        while not execution.ended.wait(self._pace.look_s):
            if time.monotonic() >= self._give_back_at:
                return "stopped"
            why = self._told_to_stop(claim)
            if why == "lost":
                # Most likely it has ended the run itself and is about to go.
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since < self._pace.kill_after_s:
                    continue
            if why is not None:
                return why
        return None

    def _told_to_stop(self, claim: Claim) -> Why | None:
        """Say why a run that does not stop by itself must be ended."""
        patience = self._pace.kill_after_s
        try:
            standing = leases.standing(self._database, claim)
        except LeaseLostError:
            return "lost"
        except StoreError as error:
            log.warning("can't look at the run", run=claim.run_id, reason=str(error))
            return None
        if standing.cancelled_for_s is not None and standing.cancelled_for_s >= patience:
            return "cancelled"
        return "overdue" if standing.overdue_s >= patience else None

    def _close(self, claim: Claim, code: int, why: Why | None) -> None:
        """Write the end down. Raises LeaseLostError when the run's process did, or a reaper."""
        try:
            self._end(claim, code, why)
        except LeaseLostError:
            # A reaper can't tell a worker that was cut off from a dead one.
            if why is not None or not exits.is_death(code):
                note_alive(self._database, claim)
            raise

    def _end(self, claim: Claim, code: int, why: Why | None) -> None:
        database = self._database
        if why == "lost":
            raise leases.lost(claim)
        if why == "stopped":
            endings.release(database, claim)
        elif why == "cancelled":
            endings.cancel(database, claim, Failure("user", "cancelled; its process was killed"))
        elif why == "overdue":
            failure = Failure("deadline", "ran past its deadline; its process was killed")
            endings.time_out(database, claim, failure, self._tell)
        else:
            ending = endings.abandon if exits.is_death(code) else endings.fail
            ending(database, claim, exits.failure_of(code), self._tell)

    def _reap(self) -> None:
        while True:
            try:
                self._look_around()
            except QuantwatchError as error:
                self._was_away = True
                log.warning("reaper can't look", reason=str(error))
            if self._stopping.wait(self._pace.reap_s):
                return

    def _look_around(self) -> None:
        with self._database.writer() as session:
            details = {"devices": list(self._devices), "run": self._run_id}
            note_seen(session, self._component, details)
        if self._was_away:
            # Leases ran out while nobody could renew them: whoever holds a run says first what
            # became of it, or it would count as a death.
            self._was_away = False
            return
        for trouble in reap(self._database, self._tell):
            log.warning("run had no worker", run=trouble.run_id, status=trouble.status.value)
            note_reaped(trouble)
        for trouble in expire(self._database, self._tell):
            log.error("nobody has the devices of a run", run=trouble.run_id)
            note_reaped(trouble)

    def _say_goodbye(self) -> None:
        try:
            with self._database.writer() as session:
                note_gone(session, [self.id.name])
        except StoreError as error:
            log.warning("can't sign off", reason=str(error))

    @property
    def _component(self) -> Component:
        return Component(self.id.name, "worker", self.id.host, self.id.pid)
