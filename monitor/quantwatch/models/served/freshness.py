"""Is an answer to this question, of the model that the run began with?

A server that is restarted with other weights between two requests says so by its model name or
system fingerprint; a cache between us and it repeats an answer's id, or answers with an old date.
"""

from quantwatch.models.served.answers import Stamp
from quantwatch.models.served.trouble import StaleAnswerError, UnusableServerError

_SKEW_S = 5.0
"""By how much later answers may be dated earlier: several processes behind one address."""


class Freshness:
    """Compares the stamps of a run's answers with each other."""

    def __init__(self) -> None:
        self._first: Stamp | None = None
        self._seen: set[str] = set()
        self._newest = 0.0

    def check(self, stamp: Stamp) -> None:
        """Take an answer's stamp.

        Raises StaleAnswerError for an old answer, UnusableServerError for another model.
        """
        if stamp.request is not None and stamp.request in self._seen:
            raise StaleAnswerError("an answer that was given before (stale)")
        if stamp.created and stamp.created < self._newest - _SKEW_S:
            raise StaleAnswerError(
                f"an answer made {self._newest - stamp.created:.0f} s ago (stale)"
            )
        self._compare(stamp)
        self._newest = max(self._newest, stamp.created or 0.0)
        if stamp.request is not None:
            self._seen.add(stamp.request)

    def _compare(self, stamp: Stamp) -> None:
        first = self._first or stamp
        for what, now, before in (
            ("model", stamp.model, first.model),
            ("system fingerprint", stamp.fingerprint, first.fingerprint),
        ):
            if now is not None and before is not None and now != before:
                raise UnusableServerError(
                    f"the server changed while it was measured: its {what} is {now[:80]!r}, was "
                    f"{before[:80]!r}"
                )
        # What the first answer left out, a later one may say.
        self._first = Stamp(first.model or stamp.model, first.fingerprint or stamp.fingerprint)
