"""The one place where stages meet: prompts → models → capture → metrics → rules → store.

`request` says what to do, `measure` does what needs the models, `judge` says what it means, `run`
stores it. `estimating` tells beforehand what a run takes; `python_api` is `quantwatch.compare`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantwatch.pipeline.estimating import Estimate, estimate, look_up_named
    from quantwatch.pipeline.python_api import compare
    from quantwatch.pipeline.request import RunRequest
    from quantwatch.pipeline.run import run_check

__all__ = ["Estimate", "RunRequest", "compare", "estimate", "look_up_named", "run_check"]

_HOMES = {
    **dict.fromkeys(("Estimate", "estimate", "look_up_named"), "estimating"),
    "compare": "python_api", "RunRequest": "request", "run_check": "run",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import on first use: most need models, and the service, which has none, uses the rest."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
