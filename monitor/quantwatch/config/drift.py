"""What a rule on `drift` can watch: the names of everything that may change beside the numbers."""

from fnmatch import fnmatchcase

from quantwatch.telemetry import LIBRARIES

DIGESTS = ("weights_sha", "config_sha", "tokenizer_sha", "recipe_sha", "serve_sha", "fault_sha")
"""Digests of a candidate; with `reference.` before them, of the reference."""
MEASURED = ("suite_hash", "capture_sha", "metrics_version")
"""What was measured, and how."""
_MACHINE = ("python", "platform", "git_commit", "gpus")
_CPU = ("machine", "cores", "model", "capability", "threads")
_GPU = ("uuid", "name", "driver")
_MOST_GPUS = 64


def matches_name(globs: tuple[str, ...], name: str) -> bool:
    """Say whether a name is watched; `*` stands for any text, dots included."""
    return any(fnmatchcase(name, glob) for glob in globs)


def name_problem(glob: str) -> str | None:
    """Say why a glob can match nothing that may drift, None when it can."""
    if any(fnmatchcase(name, glob) for name in _names()):
        return None
    return (
        f"{glob!r} is nothing that may drift; allowed are globs over {', '.join(DIGESTS)} (of the "
        f"candidate; reference.… of the reference), execution, size_bytes, {', '.join(MEASURED)}, "
        "environment.libraries.torch, environment.gpus.0.driver, environment.cpu.threads, …"
    )


def _names() -> list[str]:
    return [
        *DIGESTS,
        *(f"reference.{digest}" for digest in DIGESTS),
        *("execution", "reference.execution", "size_bytes", *MEASURED),
        *(f"environment.{name}" for name in _MACHINE),
        *(f"environment.libraries.{name}" for name in LIBRARIES),
        *(f"environment.cpu.{name}" for name in _CPU),
        *(f"environment.gpus.{i}.{name}" for i in range(_MOST_GPUS) for name in _GPU),
    ]
