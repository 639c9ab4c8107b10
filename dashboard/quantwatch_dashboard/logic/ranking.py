"""Which candidate of a run matters most: one rule for every page. Pure."""

import math

from quantwatch.domain import Verdict


def rank(verdict: Verdict | None, kl: float | None) -> tuple[int, float]:
    """Return a sort key: the worst verdict first, then the largest output KL.

    A KL that is not finite, or that nobody measured, is the largest. Who could not be measured at
    all has no verdict and comes last. Only what the run itself measured counts: who leads must not
    change when another baseline is pinned.
    """
    size = kl if kl is not None and math.isfinite(kl) else math.inf
    return len(Verdict) if verdict is None else verdict.rank, -size
