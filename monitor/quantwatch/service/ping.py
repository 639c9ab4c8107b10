"""The external dead man: a URL that is called after each run, by Healthchecks' protocol.

Whoever listens there notices when nothing comes any more, which a dead machine can't tell itself.
"""

import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta

from quantwatch.config.endpoints import Endpoint
from quantwatch.config.receiver_urls import parse_url
from quantwatch.config.schema import Config
from quantwatch.config.secrets import from_environment
from quantwatch.delivery.client import Client
from quantwatch.domain import RunStatus
from quantwatch.observability import logs, redaction
from quantwatch.observability.tracing import trace_of
from quantwatch.store.ended import Ended, ended_within
from quantwatch.store.session import Database

LOOK_BACK = timedelta(minutes=15)
_SHORTEST_SECRET = 8
log = logs.get(__name__)


def dead_man_of(config: Config, env: Mapping[str, str]) -> Endpoint | None:
    """Return where it is called, None when nobody listens. Raises ConfigError."""
    variable = config.service.dead_man_url_env
    if variable is None:
        return None
    key = "service.dead_man_url_env"
    url = parse_url(key, from_environment(key, variable, env).reveal())
    for part in url.path.split("/"):
        if len(part) >= _SHORTEST_SECRET:
            redaction.register(part)
    return Endpoint("dead-man", url)


class DeadManPing:
    """Calls the URL once for each run that ended since this process began."""

    def __init__(
        self,
        db: Database,
        listener: Callable[[], Endpoint | None],
        leads: Callable[[], bool],
        client: Client | None = None,
    ) -> None:
        self._db, self._listener, self._leads = db, listener, leads
        self._client = client or Client()
        self._known: deque[str] = deque((run.run_id for run in self._ended(())), maxlen=10_000)

    def __call__(self) -> None:
        """Tell of new ends, oldest first; one that can't be told now is told at the next look."""
        endpoint = self._listener()
        for run in self._ended(self._known):
            # Another process that leads has told of it.
            if endpoint is not None and self._leads() and not self._tell(endpoint, run):
                return
            self._known.append(run.run_id)

    def _ended(self, known: "tuple[str, ...] | deque[str]") -> list[Ended]:
        with self._db.reader() as session:
            return ended_within(session, LOOK_BACK, frozenset(known))

    def _tell(self, endpoint: Endpoint, run: Ended) -> bool:
        url = endpoint.url
        if run.status is not RunStatus.SUCCEEDED:
            url = url.copy_with(path=url.path.rstrip("/") + "/fail")
        url = url.copy_set_param("rid", str(uuid.UUID(trace_of(run.run_id))))
        body = f"{run.check}: run {run.run_id} {run.status.value}".encode()
        answer = self._client.post(replace(endpoint, url=url), {}, body)
        if answer.status is not None and 200 <= answer.status < 300:
            return True
        why = answer.error_code or f"HTTP {answer.status}"
        log.warning("dead-man URL not reached", run=run.run_id, host=endpoint.host, why=why)
        return False
