"""The JSON document of a run: the contract with CI jobs and scripts.

Bare numbers are means over the measured tokens. A number that isn't finite is null beside
`<name>_kind`: nan, posinf, neginf, or missing. When only some values are non-finite, the mean is of
the finite ones; `num_nonfinite` and `first_nonfinite` say so. docs/ci.md lists the keys.
"""

import json
from typing import Any

from quantwatch.domain import Alert, CandidateResult, RunResult, RunStatus, Scope, layer_index
from quantwatch.domain.drift import changed
from quantwatch.metrics.registry import ROUTER_METRICS
from quantwatch.report import detection, positions
from quantwatch.report.figures import Figures
from quantwatch.report.numbers import MISSING, Number, as_fields
from quantwatch.report.words import alert_value

Document = dict[str, Any]
_KL = ("mean", "se", "p50", "p90", "p99", "p999", "max")
_SERVED = ("served_tv", "served_tv_most", "served_unseen")
_PLAIN = ("top1_agreement", "topk_logit_deviation_k5", "topk_logit_deviation_k3")
_LENS = ("mean", "p99", "max")
_LAYER = ("isolated_error", "rel_error", "sqnr_db", "cosine", "feature_kl")
_SCOPE = ("isolated_error", "rel_error", "sqnr_db", "cosine")


def document(result: RunResult) -> Document:
    """Return a run as strict JSON data: no NaN, no infinity, every listed key present."""
    reference = result.reference
    return {
        "run_id": result.run_id,
        "check": result.check,
        "status": str(result.status),
        "verdict": _verdict(result),
        "reason": result.reason,
        "reference": reference
        and {"name": reference.name, "fingerprint": reference.fingerprint.digest},
        "suite": {
            "name": result.suite_name,
            "hash": result.suite_hash,
            "num_tokens": result.num_tokens,
        },
        "baseline": result.baseline_run_id,
        "reference_cache": result.capture.get("reference_cache"),
        "sharding": result.capture.get("sharding"),
        "timings_s": dict(result.timings_s),
        "candidates": [_candidate(result, candidate) for candidate in result.candidates],
        "alerts": [_alert(alert) for alert in result.alerts],
    }


def failure_document(status: RunStatus, reason: str) -> Document:
    """Return the document of a command that ended before there was a run: same keys, no numbers."""
    return {
        "run_id": None,
        "check": None,
        "status": str(status),
        "verdict": None,
        "reason": reason,
        "reference": None,
        "suite": {"name": None, "hash": None, "num_tokens": None},
        "baseline": None,
        "reference_cache": None,
        "sharding": None,
        "timings_s": {},
        "candidates": [],
        "alerts": [],
    }


def render(result: RunResult) -> str:
    """Return the document as indented JSON text. Raises ValueError rather than write NaN."""
    return dumps(document(result))


def dumps(data: Any) -> str:
    """Return strict JSON text that ends with a newline."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def _verdict(result: RunResult) -> str | None:
    succeeded = result.status == RunStatus.SUCCEEDED
    return str(result.verdict) if succeeded and result.verdict is not None else None


def _candidate(result: RunResult, candidate: CandidateResult) -> Document:
    figures, variant, culprit = Figures(candidate), candidate.variant, candidate.culprit
    found = candidate.first_nonfinite
    return {
        "name": candidate.name,
        "verdict": candidate.verdict and str(candidate.verdict),
        "fingerprint": variant and variant.fingerprint.digest,
        "execution": variant and variant.execution,
        "notes": list(variant.notes) if variant else [],
        "culprit": culprit and culprit.scope,
        "culprit_words": culprit and culprit.words,
        "failure": candidate.failure,
        "changed": changed(candidate.baseline_differences),
        "detectable": detection.documents(candidate),
        "logit_kl": _statistics(figures, "logit_kl", "model", _KL),
        "served_kl": _statistics(figures, "served_kl", "model", _KL),
        "bit_equal": candidate.bit_equal,
        "first_nonfinite": found
        and {"scope": found.scope, "prompt": found.prompt, "position": found.position},
        **as_fields(_output_numbers(figures)),
        "num_nonfinite": figures.num_nonfinite,
        "kl_by_position": positions.documents(result, candidate.name),
        "num_missing": figures.num_missing,
        "layers": [_layer(figures, scope) for scope in figures.layers],
        "scopes": [_scope(figures, scope) for scope in figures.scopes],
    }


def _output_numbers(figures: Figures) -> dict[str, Number]:
    reference, candidate, ratio = figures.perplexities
    variant = figures.candidate.variant
    return {
        "leaked_mass": figures.leaked_mass,
        **{name: figures.number(name) for name in (*_PLAIN, *_SERVED)},
        "ppl_reference": reference,
        "ppl_candidate": candidate,
        "ppl_ratio": ratio,
        "bits_per_weight": MISSING if variant is None else Number.of(variant.bits_per_weight),
    }


def _layer(figures: Figures, scope: Scope) -> Document:
    return {
        "index": layer_index(scope),
        "name": scope,
        "lens_kl": _statistics(figures, "lens_kl", scope, _LENS),
        **as_fields({name: figures.number(name, scope) for name in _LAYER}),
        "router": _router(figures, scope),
    }


def _router(figures: Figures, scope: Scope) -> Document | None:
    """Return what a layer's router does; None where no choice of experts was compared."""
    if figures.row("router_overlap", scope) is None:
        return None
    names = {metric: metric.removeprefix("router_") for metric in ROUTER_METRICS}
    return as_fields({name: figures.number(metric, scope) for metric, name in names.items()})


def _scope(figures: Figures, scope: Scope) -> Document:
    return {"name": scope, **as_fields({name: figures.number(name, scope) for name in _SCOPE})}


def _alert(alert: Alert) -> Document:
    return {
        "rule": alert.rule,
        "candidate": alert.candidate,
        "scope": alert.scope,
        **as_fields({"value": alert_value(alert), "threshold": Number.of(alert.threshold)}),
        "severity": str(alert.severity),
    }


def _statistics(figures: Figures, metric: str, scope: str, names: tuple[str, ...]) -> Document:
    return as_fields({name: figures.number(metric, scope, name) for name in names})
