"""Who measures a check's batches, and what only one process can do. Pure."""

from collections.abc import Sequence
from typing import Literal, Protocol

Executor = Literal["inline", "local", "ray"]


class _Variant(Protocol):
    @property
    def device(self) -> str: ...
    @property
    def served(self) -> object | None: ...


class _Candidate(_Variant, Protocol):
    @property
    def name(self) -> str: ...


class _Check(Protocol):
    @property
    def executor(self) -> Executor: ...
    @property
    def shards(self) -> int | None: ...
    @property
    def ray_address(self) -> str | None: ...
    @property
    def reference_cache(self) -> bool: ...
    @property
    def reference(self) -> _Variant: ...
    @property
    def candidates(self) -> Sequence[_Candidate]: ...


def executor_problem(check: _Check) -> str | None:
    """Return why a check can't be spread as it says, None when it can (or isn't)."""
    executor = check.executor
    if executor != "ray" and check.ray_address is not None:
        return f'ray_address is for executor = "ray", not "{executor}"'
    if executor == "inline":
        if check.shards is None:
            return None
        return f'shards = {check.shards} is for executor = "local" or "ray", not "inline"'
    if check.reference_cache:
        return (
            f'executor = "{executor}" and reference_cache = true exclude each other: a reference '
            'is recorded and read by one process; allowed with it: executor = "inline"'
        )
    served = [candidate.name for candidate in check.candidates if candidate.served is not None]
    if served:
        return (
            f'executor = "{executor}" can\'t ask a server: {", ".join(served)} is asked by one '
            'process, prompt by prompt; allowed with served candidates: executor = "inline"'
        )
    return _ray_problem(check) if executor == "ray" else None


def _ray_problem(check: _Check) -> str | None:
    """Ray shows a worker its own GPU alone, as the first one; a cluster is joined or made here."""
    if check.ray_address == "local":
        return 'ray_address = "local" is not allowed; without it the run starts a cluster here'
    for variant in (check.reference, *check.candidates):
        if variant.device not in ("cpu", "cuda", "cuda:0"):
            return (
                f'executor = "ray": device = "{variant.device}" is not allowed; allowed: "cpu" and '
                '"cuda": Ray gives each worker one GPU, whichever that is'
            )
    return None
