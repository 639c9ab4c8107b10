"""Which parts of a candidate cost how much of its KL: each put into the reference alone.

At the boundary before a part the reference's states are at hand (`SuffixRun`); the candidate's part
stands in for the reference's (`StandIn`), and the rest of the reference is run behind it.

    kl              KL(reference ‖ reference with this part of the candidate), mean, nats
    noise_kl        the same with noise of the size of the part's error, token by token: where kl
                    is much larger, the error's direction is what hurts, where smaller, its size
    relative_error  ‖y′ − y‖ ÷ ‖y‖ of the part's output y, fed what the reference feeds it
    share           kl ÷ the candidate's KL; additivity: Σ kl ÷ the candidate's KL, over the parts
                    that make up the model (`whole`). Below 1 errors reinforce each other, above 1
                    they cancel or saturate.

Three controls. The reference through the same detour at every boundary, first input: exactly 0 or
it is an error. A part whose output is the reference's bit for bit isn't run: 0. And all `whole`
parts at once: what the candidate's KL has beyond it lies outside of them (another rotary embedding,
another basis) and no share tells of it.

Given up: candidates whose states between layers live in another basis (a rotated residual stream).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from quantwatch_kernels.quantize.stand_in import Dtypes, Mode, StandIn
from quantwatch_kernels.quantize.suffix import SuffixRun
from quantwatch_kernels.quantize.walk import LayerWalk

__all__ = ["Attributed", "Part", "Place", "Share", "attribute"]

Place = Literal["embedding", "layers", "behind"]


@dataclass(frozen=True, slots=True)
class Part:
    """A module of the reference, and the candidate's that stands in for it."""

    name: str
    module: nn.Module
    other: nn.Module
    place: Place
    """Before the decoder layers, in one of them, or behind them (final norm, head)."""
    layer: int | None = None
    """Number of its decoder layer, in "layers" only."""
    whole: bool = False
    """Whether it is one of those that make up the model, without any part of another."""
    may_rest: bool = False
    """Whether it may be left out: a routed expert that no token chooses."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one part costs alone; see the module."""

    part: Part
    kl: float
    noise_kl: float
    """0 where the part's error is 0."""
    relative_error: float


@dataclass(frozen=True, slots=True)
class Attributed:
    """All parts, and what they are parts of."""

    kl: float
    """KL(reference ‖ candidate) on the same tokens."""
    together_kl: float
    """… of all `whole` parts put into the reference at once: kl, if nothing else differs."""
    control_kl: float
    """The largest KL of the reference through the detour: 0."""
    num_tokens: int
    shares: tuple[Share, ...]
    """In the order of the parts."""

    @property
    def parts_kl(self) -> float:
        """Σ kl of the parts that make up the model."""
        return math.fsum(share.kl for share in self.shares if share.part.whole)

    @property
    def additivity(self) -> float | None:
        """Σ kl ÷ the candidate's KL; None where that is 0."""
        return self.parts_kl / self.kl if self.kl else None


def attribute(
    run: SuffixRun,
    candidate: nn.Module,
    parts: Sequence[Part],
    *,
    dtypes: Dtypes,
    seed: int = 0,
    tell: Callable[[Share], None] = lambda _: None,
) -> Attributed:
    """Measure every part, in the order of the model; both models end as they were.

    `run` stands at the first layer and is walked to the last. `dtypes` are those that the reference
    and the candidate compute in: of their hidden states. `tell` hears of each share. Raises
    ValueError for a part that is never called, a KL that isn't finite, and a control beyond 0.
    """
    if run.walk.position:
        raise ValueError(f"the run must stand at layer 0; it stands at {run.walk.position}.")
    names = [part.name for part in parts]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"parts need names, each its own; they are {names}.")
    kl = _finite("the candidate", run.kl(LayerWalk(candidate, run.walk.inputs)))
    stands = {p.name: StandIn(p.module, p.other, dtypes, p.name, seed) for p in parts}
    bench = _Bench(run, stands)
    together = bench.together([part for part in parts if part.whole])
    found = {}
    for share in bench.shares(parts):
        found[share.part.name] = share
        tell(share)
    shares = tuple(found[name] for name in names)
    return Attributed(kl, together, bench.control, run.num_scored, shares)


class _Bench:
    """The reference with a stand-in for every part."""

    def __init__(self, run: SuffixRun, stands: dict[str, StandIn]) -> None:
        self.run = run
        self.stands = stands
        self.control = 0.0

    def together(self, parts: Sequence[Part]) -> float:
        with self._as("candidate", parts):
            return _finite("all parts together", self._kl("embedding"))

    def shares(self, parts: Sequence[Part]) -> Iterator[Share]:
        """Yield the parts' shares, walking the run to its end."""
        yield from self._at([part for part in parts if part.place == "embedding"])
        for index in range(len(self.run.walk.layers)):
            yield from self._at([part for part in parts if part.layer == index])
            self.run.walk.run(index)
        yield from self._at([part for part in parts if part.place == "behind"])

    def _at(self, parts: Sequence[Part]) -> Iterator[Share]:
        """Yield the shares of parts that are met at the walk's position."""
        if not parts:
            return
        place = parts[0].place
        with self._as("compared", parts):
            self._touch(parts)
            for part in parts:
                self._require_called(part)
        for part in parts:
            stand = self.stands[part.name]
            if stand.is_equal:
                yield Share(part, 0.0, 0.0, 0.0)
                continue
            kl, noise = (self._alone(part, mode) for mode in ("candidate", "noise"))
            yield Share(part, kl, noise, stand.relative_error)
        with self._as("reference", parts):
            control = self._kl(place, first=True)
        if control != 0:
            raise ValueError(
                f"{parts[0].name}: nothing is swapped, and KL is {control:.3g}, not 0: this model "
                "doesn't compute the same twice."
            )

    def _alone(self, part: Part, mode: Mode) -> float:
        what = f"{part.name} alone" if mode == "candidate" else f"noise at {part.name}"
        with self._as(mode, [part]):
            found = _finite(what, self._kl(part.place))
            self._require_called(part)
            return found

    def _require_called(self, part: Part) -> None:
        """Refuse a swap that nobody notices: its KL of 0 would look like an innocent part's."""
        if not self.stands[part.name].num_calls and not part.may_rest:
            raise ValueError(f"{part.name} is never called: nothing can stand in for it.")

    def _kl(self, place: Place, *, first: bool = False) -> float:
        run, only = self.run, range(1) if first else None
        return run.kl(LayerWalk(run.model, run.walk.inputs) if place == "embedding" else None,
                      only=only)  # fmt: skip

    def _touch(self, parts: Sequence[Part]) -> None:
        """Run parts that are met at the walk's position once per input."""
        walk, layer = self.run.walk, parts[0].layer
        with torch.no_grad():
            for number, (ids, hidden) in enumerate(zip(walk.inputs, walk.hidden, strict=True)):
                if parts[0].place == "embedding":
                    for part in parts:
                        part.module(ids)
                elif layer is not None:
                    walk.call(layer, number, hidden.clone())
                else:
                    walk.logits(number, hidden.clone(), self.run.scored[number])

    def _as(self, mode: Mode, parts: Sequence[Part]) -> ExitStack:
        stack = ExitStack()
        for part in parts:
            stack.enter_context(self.stands[part.name].as_(mode))
        return stack


def _finite(what: str, kl: float) -> float:
    if not math.isfinite(kl):
        raise ValueError(f"{what}: its KL is {kl}, so nothing can be attributed.")
    return kl
