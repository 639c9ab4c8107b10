"""A rule never fires on an estimate that the exact sample of the same run doesn't support.

At the sampled positions both were taken: D, the mean of estimate − exact with its standard error,
clustered by prompt. The exact mean over all positions is near estimate − D. A breach stands if that
is beyond the limit by another 3 standard errors; otherwise the rule can't tell.
"""

from quantwatch.alerts.limits import Limit
from quantwatch.alerts.readings import Reading
from quantwatch.alerts.words import number
from quantwatch.domain import CandidateResult, Scope
from quantwatch.metrics.registry import METRICS

_STANDARD_ERRORS = 3


def margin(candidate: CandidateResult, scope: Scope) -> float | None:
    """Return by how much an estimate has to pass its limit; None where none is supported."""
    sample = candidate.find("lens_kl_difference", scope)
    if sample is None or sample.mean is None or sample.se is None:
        return None
    return max(0.0, sample.mean + _STANDARD_ERRORS * sample.se)


def unsupported(candidate: CandidateResult, reading: Reading, limit: Limit) -> str | None:
    """Say why an estimate beyond its limit is no breach; None when it is one, or no estimate."""
    if not METRICS[reading.row.metric].estimated:
        return None
    sample = candidate.find("lens_kl_difference", reading.scope)
    if sample is None or sample.mean is None or sample.se is None:
        return "; the exact sample has less than two prompts: an estimate alone decides nothing"
    error = _STANDARD_ERRORS * sample.se
    assert reading.value is not None
    if reading.value - sample.mean - error > limit.threshold:
        return None
    return (
        f"; the exact sample doesn't support it: there the estimate is {number(sample.mean)} more, "
        f"± {number(error)} ({_STANDARD_ERRORS} standard errors)"
    )
