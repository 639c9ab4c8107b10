"""When two runs may be compared: same suite, reference, capture and metrics.

Everything else (candidate weights, recipe, kernel, driver) is a possible cause of a difference and
no reason to refuse.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from quantwatch.config.schema import CheckConfig
from quantwatch.domain import CandidateResult, Json, RunResult, Variant

_MEANING = {
    "weights_sha": "the reference has other weights",
    "config_sha": "the reference is configured differently (architecture, dtype, attention)",
    "tokenizer_sha": "the reference has another tokenizer: token ids mean something else",
    "recipe_sha": "the reference is quantized differently",
    "serve_sha": "the reference is served differently",
    "fault_sha": "other faults are planted in the reference",
}
_OF_CAPTURE = (
    *("lens", "lens_positions", "lens_products"),
    *("isolated_fraction", "batch_tokens", "prefill_chunk"),
)
"""Settings of a check that capture is planned by."""
_SHORT = 12
_NONE = "none"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One digest that keeps two runs from being compared, and what that means."""

    name: str
    now: str
    before: str
    meaning: str


def mismatches(run: RunResult, baseline: RunResult) -> tuple[str, ...]:
    """Return a sentence per digest that keeps two runs from being compared; empty if none does."""
    return tuple(map(_sentence, differing(run, baseline)))


def differing(run: RunResult, baseline: RunResult) -> Iterator[Mismatch]:
    """Yield the digests that keep two runs from being compared, shortened."""
    if run.suite_hash != baseline.suite_hash:
        yield _mismatch("suite hash", run.suite_hash, baseline.suite_hash, "other prompts")
    if run.num_prompts != baseline.num_prompts:
        counts = str(run.num_prompts), str(baseline.num_prompts)
        yield _mismatch("num_prompts", *counts, "another number of prompts is measured")
    yield from _references(run.reference, baseline.reference)
    if run.capture_sha != baseline.capture_sha:
        meaning = _settings(run.config, baseline.config)
        yield _mismatch("capture_sha", run.capture_sha, baseline.capture_sha, meaning)
    yield from _servers(run, baseline)
    if run.metrics_version != baseline.metrics_version:
        versions = str(run.metrics_version), str(baseline.metrics_version)
        yield _mismatch("metrics_version", *versions, "the metrics are computed differently")


def short(digest: str) -> str:
    """Return the first letters of a digest, a dash for none."""
    return digest[:_SHORT] or "–"


def _settings(now: Json, before: Json) -> str:
    """Return which settings of two checks make another capture, with both values."""
    if not (now and before):
        return "the settings of one of them aren't known"
    found = []
    for name in _OF_CAPTURE:
        default = CheckConfig.model_fields[name].default  # what a run of before had
        ours, theirs = (config.get(name, default) for config in (now, before))
        if ours != theirs:
            found.append(f"{name} is {_written(ours)}, there {_written(theirs)}")
    if not found:
        return "its settings are equal: another version of quantwatch captures otherwise"
    return "; ".join(found)


def _written(value: object) -> str:
    return "absent" if value is None else json.dumps(value)


def _references(now: Variant | None, before: Variant | None) -> Iterator[Mismatch]:
    if now is None or before is None:
        if now is not before:
            known = _NONE if now is None else "", _NONE if before is None else ""
            yield Mismatch("reference", *known, "it was never loaded")
        return
    for name, meaning in _MEANING.items():
        ours, theirs = getattr(now.fingerprint, name), getattr(before.fingerprint, name)
        if ours != theirs:
            yield _mismatch(f"reference {name}", ours, theirs, meaning)


def _servers(run: RunResult, baseline: RunResult) -> Iterator[Mismatch]:
    """Yield served candidates that are asked for another number of log-probabilities.

    Their bounds are tighter or wider for that alone.
    """
    for candidate in run.candidates:
        now, before = _asked(candidate), _asked(baseline.find(candidate.name))
        if now is not None and before is not None and now != before:
            meaning = "its bounds are tighter or wider for that alone"
            yield _mismatch(f"top_k of {candidate.name}", str(now), str(before), meaning)


def _asked(candidate: CandidateResult | None) -> int | None:
    if candidate is None or candidate.variant is None:
        return None
    served = candidate.variant.source.get("served") or {}
    asked: int | None = served.get("top_k")
    return asked


def _mismatch(name: str, now: str, before: str, meaning: str) -> Mismatch:
    return Mismatch(name, short(now), short(before), meaning)


def _sentence(found: Mismatch) -> str:
    if found.name == "reference":
        which = "this run" if found.now == _NONE else "the baseline"
        return f"reference: {which} has none, so {found.meaning}"
    return f"{found.name} {found.now}, baseline {found.before}: {found.meaning}"
