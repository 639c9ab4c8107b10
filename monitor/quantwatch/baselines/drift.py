"""What changed since the baseline, as a difference of digests: the first thing to ask of an alert.

A record says what it is about (`part`), so that a moved reference is never taken for a regression
of the candidate, and a new driver not for new weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantwatch.domain import Json, RunResult, Variant
from quantwatch.domain.drift import ABSENT

_DIGESTS = {
    "weights_sha": "weights",
    "config_sha": "configuration",
    "tokenizer_sha": "tokenizer",
    "recipe_sha": "recipe",
    "serve_sha": "serving",
    "fault_sha": "planted fault",
    "execution": "execution",
    "size_bytes": "size",
}
_PREFIXES = {
    "reference.": "reference",
    "environment.libraries.": "library",
    "environment.gpus": "gpu",
    "environment.cpu.threads": "threads",
    "environment.cpu.": "cpu",
    "environment.git_commit": "kernel commit",
    "environment.": "system",
}
_MEASURED = ("suite_hash", "capture_sha", "metrics_version")


def drift(run: RunResult, baseline: RunResult, candidate: str) -> tuple[Json, ...]:
    """Return one record per name that changed: name, part, value, baseline; strict JSON.

    Parts: measured, reference, weights, configuration, tokenizer, recipe, serving, planted fault,
    execution, size, library, driver, gpu, threads, cpu, kernel commit, system. A candidate that the
    baseline lacks has not drifted itself.
    """
    now, before = _names(run, candidate), _names(baseline, candidate)
    if _variant(run, candidate) is None or _variant(baseline, candidate) is None:
        now, before = _without_candidate(now), _without_candidate(before)
    return tuple(
        {"name": name, "part": part_of(name), "value": value, "baseline": known}
        for name in dict.fromkeys((*now, *before))
        if (value := now.get(name, ABSENT)) != (known := before.get(name, ABSENT))
    )


def part_of(name: str) -> str:
    """Return what a name is about."""
    if name in _MEASURED:
        return "measured"
    if name in _DIGESTS:
        return _DIGESTS[name]
    if name.startswith("environment.gpus") and name.endswith(".driver"):
        return "driver"
    return next(part for prefix, part in _PREFIXES.items() if name.startswith(prefix))


def _names(run: RunResult, candidate: str) -> dict[str, Any]:
    """Return everything that may drift, by name, what matters most first."""
    found: dict[str, Any] = {name: getattr(run, name) for name in _MEASURED}
    if run.reference is not None:
        found |= {f"reference.{name}": value for name, value in _of_variant(run.reference)}
    variant = _variant(run, candidate)
    if variant is not None:
        found |= dict(_of_variant(variant))
        found["size_bytes"] = variant.size_bytes
    return found | dict(_flat("environment", run.environment))


def _of_variant(variant: Variant) -> Iterator[tuple[str, Any]]:
    for name in variant.fingerprint.__slots__:
        yield name, getattr(variant.fingerprint, name)
    yield "execution", variant.execution


def _variant(run: RunResult, candidate: str) -> Variant | None:
    found = run.find(candidate)
    return None if found is None else found.variant


def _without_candidate(names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in names.items() if name not in _DIGESTS}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of tables and lists as dotted names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}", inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, inner in enumerate(value):
            yield from _flat(f"{prefix}.{index}", inner)
    else:
        yield prefix, value
