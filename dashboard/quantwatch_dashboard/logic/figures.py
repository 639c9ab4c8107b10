"""The index of a candidate's measurements: built once, not for each of a page's numbers. Pure."""

from collections import OrderedDict
from threading import Lock

from quantwatch.domain import CandidateResult, Variant
from quantwatch.report.figures import Figures
from quantwatch_dashboard import text

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


def bits(variant: Variant | None) -> str:
    """Return bits per weight, a dash where they aren't known: a server doesn't always tell."""
    known = None if variant is None else variant.bits_per_weight
    return text.NONE if known is None else f"{known:.2f}"
