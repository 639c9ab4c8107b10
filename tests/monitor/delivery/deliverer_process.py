"""A real deliverer for the tests that kill it: URL, port, seconds the clock is moved, kill point.

With K10 it ends itself (SIGKILL) after the third 2xx and before that is written down.
"""

import os
import signal
import sys
from collections.abc import Mapping
from datetime import timedelta

from tests.monitor.delivery.loopback import endpoint_to

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery.client import Answer, Client
from quantwatch.delivery.loop import Deliverer
from quantwatch.store.session import open_database


class Dying(Client):
    """Ends the process when the third answer is there."""

    count = 0

    def post(self, endpoint: Endpoint, headers: Mapping[str, str], body: bytes) -> Answer:
        answer = super().post(endpoint, headers, body)
        self.count += 1
        if self.count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


def main(url: str, port: str, shift_s: str, kill_point: str) -> None:
    database = open_database(url)
    database.clock_shift = timedelta(seconds=float(shift_s))
    sender = Dying() if kill_point == "K10" else Client()
    deliverer = Deliverer(database, {"hook": endpoint_to(int(port))}, sender)
    deliverer.start()
    print("started", flush=True)
    sys.stdin.readline()
    deliverer.stop(5)
    database.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
