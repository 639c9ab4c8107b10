"""Carries out queued runs: claims, has each measured in a process of its own, ends what is left.

`worker` watches over runs and imports no torch; `child` is the process of one run, `performing`
what it does.
"""

from quantwatch.worker.execution import Children
from quantwatch.worker.hooks import telling
from quantwatch.worker.patience import Pace
from quantwatch.worker.worker import Worker

__all__ = ["Children", "Pace", "Worker", "telling"]
