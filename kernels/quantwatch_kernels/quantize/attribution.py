"""Which parts of a candidate cost how much of its KL: each put into the reference alone.

At the boundary before a part the reference's states are at hand (`SuffixRun`); the candidate's part
stands in for the reference's (`StandIn`), and the rest of the reference is run behind it
(`Detour`).

    kl              KL(reference ‖ reference with this part of the candidate), mean, nats
    noise_kl        the same with noise of the size of the part's error, token by token: where kl
                    is much larger, the error's direction is what hurts, where smaller, its size
    relative_error  ‖y′ − y‖ ÷ ‖y‖ of the part's output y, fed what the reference feeds it

A share is kl ÷ the candidate's KL; the sum over the parts that make up the model (`whole`) needn't
be 1: below it errors reinforce each other, above it they cancel or saturate.

Three controls. The reference through the same detour at every boundary, first input, nothing
swapped: exactly 0 or it is an error; how many there were is told. A part whose output is the
reference's bit for bit isn't run: 0. And all `whole` parts at once: what the candidate's KL has
beyond it lies outside of them (another rotary embedding, another basis) and no share tells of it.

Given up: candidates whose states between layers live in another basis (a rotated residual stream).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from quantwatch_kernels.quantize.detours import Detour, entered, finite
from quantwatch_kernels.quantize.stand_in import Dtypes, StandIn
from quantwatch_kernels.quantize.suffix import SuffixRun
from quantwatch_kernels.quantize.walk import LayerWalk

__all__ = ["Attributed", "Part", "Place", "Share", "Terms", "attribute"]

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
    num_boundaries: int
    """At how many the reference, with nothing swapped, was run again: its KL was 0 at each."""
    num_tokens: int
    shares: tuple[Share, ...]
    """In the order of the parts."""
    never_called: tuple[str, ...] = ()
    """Parts without a share: whoever has them reads their weights and never calls them."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What is not a part but matters to all of them."""

    dtypes: Dtypes
    """Of the hidden states of reference and candidate: what they compute in."""
    seed: int = 0
    """Of the noise."""
    carried_bytes: int = 0
    """What begins at one boundary takes the rest of the way together, and with what began before it
    until their states are more than this (by those of one boundary at most). Where layers are read
    from files, each is read three times in all unless that limit is met."""


def attribute(
    run: SuffixRun,
    candidate: nn.Module,
    parts: Sequence[Part],
    terms: Terms,
    tell: Callable[[Share], None] = lambda _: None,
) -> Attributed:
    """Measure every part, in the order of the model; both models end as they were.

    `run` stands at the first layer and is walked to the last. `tell` hears of each share. Raises
    ValueError for a `whole` part that is never called, a KL that isn't finite, a control beyond 0.
    """
    if run.walk.position:
        raise ValueError(f"the run must stand at layer 0; it stands at {run.walk.position}.")
    names = [part.name for part in parts]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"parts need names, each its own; they are {names}.")
    kl = finite("the candidate", run.kl(LayerWalk(candidate, run.walk.inputs)))
    stands = {p.name: StandIn(p.module, p.other, terms.dtypes, p.name, terms.seed) for p in parts}
    bench = _Bench(run, stands, terms.carried_bytes)
    together = bench.together([part for part in parts if part.whole])
    found = {}
    for share in bench.shares(parts):
        found[share.part.name] = share
        tell(share)
    shares = tuple(found[name] for name in names if name in found)
    never = tuple(name for name in names if name not in found)
    return Attributed(kl, together, bench.num_boundaries, run.num_scored, shares, never)


@dataclass(frozen=True, slots=True)
class _Boundary:
    """What was begun at one boundary."""

    name: str
    control: Detour
    swaps: list[tuple[Part, Detour, Detour]]
    """(part, the candidate's in its place, noise in its place)."""

    @property
    def detours(self) -> list[Detour]:
        return [self.control, *(detour for _, *both in self.swaps for detour in both)]


class _Bench:
    """The reference with a stand-in for every part."""

    def __init__(self, run: SuffixRun, stands: dict[str, StandIn], carried_bytes: int) -> None:
        self.num_boundaries = 0
        self._run = run
        self._stands = stands
        self._carried_bytes = carried_bytes
        self._begun: list[_Boundary] = []

    def together(self, parts: Sequence[Part]) -> float:
        stands = [self._stands[part.name] for part in parts]
        detour = Detour(self._run, stands, "candidate", LayerWalk.restarted)
        return finite("all parts together", detour.kl())

    def shares(self, parts: Sequence[Part]) -> Iterator[Share]:
        """Yield the parts' shares, walking the run to its end."""
        walk = self._run.walk
        yield from self._begin([part for part in parts if part.place == "embedding"])
        for index in range(len(walk.layers)):
            yield from self._begin([part for part in parts if part.layer == index])
            self._advance()
            walk.run(index)
            if sum(d.num_bytes for b in self._begun for d in b.detours) > self._carried_bytes:
                yield from self._finish()
        yield from self._begin([part for part in parts if part.place == "behind"])
        yield from self._finish()

    def _begin(self, parts: Sequence[Part]) -> Iterator[Share]:
        """Begin the detours of parts met at the walk's position; yield shares of those without."""
        if not parts:
            return
        stands = [self._stands[part.name] for part in parts]
        with entered(stands, "compared"):
            self._touch(parts)
        called = [part for part in parts if self._is_called(part)]
        differing = [part for part in called if not self._stands[part.name].is_equal]
        yield from (Share(part, 0.0, 0.0, 0.0) for part in called if part not in differing)
        again = LayerWalk.restarted if parts[0].place == "embedding" else LayerWalk.branch
        control = Detour(self._run, stands, "reference", lambda walk: again(walk.branch([0])))
        swaps = [(part, *self._swaps(part, again)) for part in differing]
        self._begun.append(_Boundary(parts[0].name, control, swaps))

    def _is_called(self, part: Part) -> bool:
        """Say whether a stand-in would be noticed, or may rest; raise ValueError for a whole one's.

        A convolution's weight may be read by a block that never calls it.
        """
        called = self._stands[part.name].num_calls > 0
        if part.whole:
            _require_called(part, called)
        return called or part.may_rest

    def _swaps(self, part: Part, again: Callable[[LayerWalk], LayerWalk]) -> tuple[Detour, Detour]:
        stand = self._stands[part.name]
        candidate, noise = (Detour(self._run, [stand], m, again) for m in ("candidate", "noise"))
        return candidate, noise

    def _advance(self) -> None:
        for boundary in self._begun:
            for detour in boundary.detours:
                detour.advance()

    def _finish(self) -> Iterator[Share]:
        """Take all that was begun to the logits; yield its shares."""
        for _ in range(self._run.walk.position, len(self._run.walk.layers)):
            self._advance()
        for boundary in self._begun:
            if (control := boundary.control.kl()) != 0:
                raise ValueError(
                    f"{boundary.name}: nothing is swapped, and KL is {control:.3g}, not 0: this "
                    "model doesn't compute the same twice."
                )
            self.num_boundaries += 1
            for part, candidate, noise in boundary.swaps:
                kl = _alone(part, candidate, f"{part.name} alone")
                noise_kl = _alone(part, noise, f"noise at {part.name}")
                yield Share(part, kl, noise_kl, self._stands[part.name].relative_error)
        self._begun.clear()

    def _touch(self, parts: Sequence[Part]) -> None:
        """Run parts that are met at the walk's position once per input."""
        walk, layer = self._run.walk, parts[0].layer
        with torch.no_grad():
            for number, (ids, hidden) in enumerate(zip(walk.inputs, walk.hidden, strict=True)):
                if parts[0].place == "embedding":
                    for part in parts:
                        part.module(ids)
                elif layer is not None:
                    walk.call(layer, number, hidden.clone())
                else:
                    walk.logits(number, hidden.clone(), self._run.scored[number])


def _alone(part: Part, detour: Detour, what: str) -> float:
    kl = finite(what, detour.kl())
    _require_called(part, all(detour.was_called))
    return kl


def _require_called(part: Part, was_called: bool) -> None:
    """Refuse a swap that nobody notices: its KL of 0 would look like an innocent part's."""
    if not was_called and not part.may_rest:
        raise ValueError(f"{part.name} is never called: nothing can stand in for it.")
