"""The index of a candidate's measurements: built once, not for each of a page's numbers. Pure."""

from collections import OrderedDict
from threading import Lock

from quantwatch.domain import CandidateResult
from quantwatch.report.figures import Figures

_MOST = 32
_lock = Lock()
_known: OrderedDict[int, tuple[CandidateResult, Figures]] = OrderedDict()


def figures_of(candidate: CandidateResult) -> Figures:
    """Return the index of this very record: equal ones are not looked for, that costs as much."""
    key = id(candidate)
    with _lock:
        known = _known.get(key)
        if known is not None and known[0] is candidate:
            _known.move_to_end(key)
            return known[1]
    found = Figures(candidate)
    with _lock:
        # The record is kept with it: while it is, nothing else can have its id.
        _known[key] = candidate, found
        while len(_known) > _MOST:
            _known.popitem(last=False)
    return found
