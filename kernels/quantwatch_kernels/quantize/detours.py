"""The reference with parts of it answering otherwise, on its way from a boundary to the logits.

A detour begins at the boundary before the parts that it changes, and goes on one layer at a time.
So many of them can be taken through a layer one after another before the next layer is touched: one
that is read from a file is read once for all of them. What that costs is their hidden states,
float [B, T, D] per input and detour.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from quantwatch_kernels.quantize.stand_in import Mode, StandIn
from quantwatch_kernels.quantize.suffix import SuffixRun
from quantwatch_kernels.quantize.walk import LayerWalk

__all__ = ["Detour", "entered", "finite"]


class Detour:
    """`stands` answer as `mode`, all the way: a later layer may use a part again."""

    def __init__(
        self,
        run: SuffixRun,
        stands: Sequence[StandIn],
        mode: Mode,
        begin: Callable[[LayerWalk], LayerWalk],
    ) -> None:
        """`begin` makes the detour's walk from the run's, with the stand-ins in place."""
        self._run, self._stands, self._mode = run, stands, mode
        self.was_called = [False] * len(stands)
        """Whether each of them was asked for anything so far."""
        with entered(stands, mode):
            self._walk = begin(run.walk)
        self._note_calls()

    @property
    def num_bytes(self) -> int:
        """Of the states that it carries."""
        return sum(hidden.nbytes for hidden in self._walk.hidden)

    def advance(self) -> None:
        """Run the next layer."""
        with entered(self._stands, self._mode):
            self._walk.run(self._walk.position)
        self._note_calls()

    def kl(self) -> float:
        """Return the mean KL(reference ‖ reference on this detour), nats; runs what is left."""
        with entered(self._stands, self._mode):
            found = self._run.kl(self._walk)
        self._note_calls()
        return found

    def _note_calls(self) -> None:
        for number, stand in enumerate(self._stands):
            self.was_called[number] |= stand.num_calls > 0


def entered(stands: Sequence[StandIn], mode: Mode) -> ExitStack:
    """Return a context in which all of them answer as `mode`."""
    stack = ExitStack()
    for stand in stands:
        stack.enter_context(stand.as_(mode))
    return stack


def finite(what: str, kl: float) -> float:
    """Return a KL that is finite; raise ValueError naming what it is of otherwise."""
    if not math.isfinite(kl):
        raise ValueError(f"{what}: its KL is {kl}, so nothing can be attributed.")
    return kl
