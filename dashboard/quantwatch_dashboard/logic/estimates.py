"""How good a candidate's estimates of per-layer KL are, in a sentence. Pure."""

from dataclasses import dataclass

from quantwatch.domain import CandidateResult, Measurement, Scope
from quantwatch_dashboard import text

_STANDARD_ERRORS = 2


@dataclass(frozen=True, slots=True)
class LayerError:
    """Where estimate and exact value were both taken, relative to the exact mean there."""

    scope: Scope
    num_tokens: int
    token: float
    """Median over the tokens."""
    mean: float
    """Of the mean, signed."""
    interval: float | None
    """Two standard errors of it, None with less than two prompts."""


def layer_errors(candidate: CandidateResult) -> list[LayerError]:
    """Return the estimates' errors of each layer, [] where nothing was estimated."""
    found = []
    for row in candidate.measurements:
        exact = candidate.find("lens_kl", row.scope) if row.metric == "lens_kl_error" else None
        difference = candidate.find("lens_kl_difference", row.scope)
        if exact is not None and difference is not None:
            found.append(_error(row, exact, difference))
    return [each for each in found if each is not None]


def _error(row: Measurement, exact: Measurement, difference: Measurement) -> LayerError | None:
    """Return a layer's error; a layer without any difference has none to be relative to."""
    if not exact.mean or row.p50 is None or difference.mean is None:
        return None
    se = difference.se
    interval = None if se is None else _STANDARD_ERRORS * se / exact.mean
    return LayerError(row.scope, row.n, row.p50, difference.mean / exact.mean, interval)


def error_words(candidate: CandidateResult) -> str:
    """Return the worst errors of any layer as a sentence."""
    errors = layer_errors(candidate)
    if not errors:
        return "Estimates: no layer differs where the lens read every id, too."
    token = max(errors, key=lambda error: error.token)
    mean = max(errors, key=lambda error: abs(error.mean))
    spread = "" if mean.interval is None else f" ± {text.number(100 * mean.interval)}"
    return (
        f"Estimates, held against the {errors[0].num_tokens:,} tokens that the lens read in full: "
        f"a token is off by {text.number(100 * token.token)} % in the median of the worst layer "
        f"({token.scope}), a mean by {text.number(100 * mean.mean)}{spread} % in the worst "
        f"({mean.scope})."
    )
