"""The one place where stages meet: prompts → models → capture → metrics → rules → store.

`request` says what to do, `measure` does what needs the models, `judge` says what it means, `run`
stores it. `estimate` tells beforehand what a run takes; `python_api` is `quantwatch.compare`.
"""

from quantwatch.pipeline.estimate import Estimate, estimate, look_up_named
from quantwatch.pipeline.python_api import compare
from quantwatch.pipeline.request import RunRequest
from quantwatch.pipeline.run import run_check

__all__ = ["Estimate", "RunRequest", "compare", "estimate", "look_up_named", "run_check"]
