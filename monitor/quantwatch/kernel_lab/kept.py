"""How much of a reference's accuracy a candidate keeps, and how sure that is.

kept = ȳ / x̄, the candidate's share of right answers over the reference's on the same questions.
Both are right and wrong on mostly the same ones, so the standard error is the paired one: with
r = kept, the linearised ratio has the residuals (y − r·x) / x̄, whose mean is 0; their standard
error is clustered (`clustered_se`: by window for tokens; each item its own cluster for separate
questions). The 95 % interval is kept ± 1.96 se.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantwatch.metrics.statistics import PromptValues, clustered_se

Hits = Sequence[NDArray[np.bool_]]
"""Right or wrong, per cluster."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A share of accuracy (1 is all of it, more is possible); NaN where it isn't defined."""

    share: float
    se: float
    """NaN below two clusters."""


def kept_share(candidate: Hits, reference: Hits) -> Kept:
    """Return the kept share; NaN where the reference is never right.

    Raises ValueError when the two don't answer the same questions, or none.
    """
    sizes = [[len(cluster) for cluster in hits] for hits in (candidate, reference)]
    if sizes[0] != sizes[1] or not sum(sizes[0]):
        raise ValueError(
            f"a kept share needs the same questions, at least one: the candidate has "
            f"{sizes[0]} per cluster, the reference {sizes[1]}."
        )
    count = sum(sizes[0])
    right, all_right = (sum(int(cluster.sum()) for cluster in h) for h in (candidate, reference))
    if not all_right:
        return Kept(math.nan, math.nan)
    share = right / all_right
    parts = [
        PromptValues(number, (y - share * x) * (count / all_right), np.arange(len(y)))
        for number, (y, x) in enumerate(zip(candidate, reference, strict=True))
    ]
    se = clustered_se(parts, 0.0, count)
    return Kept(share, math.nan if se is None else se)
