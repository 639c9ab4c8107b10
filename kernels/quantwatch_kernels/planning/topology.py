"""Tiers of memory, the links between them, and the fastest way home for so many bytes.

A way is hop by hop: every link costs its latency and its bytes. So the way depends on the size: a
few bytes prefer few hops, many bytes prefer wide ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quantwatch_kernels.planning.alpha_beta import AlphaBeta

__all__ = ["Topology"]


@dataclass(frozen=True, slots=True)
class Topology:
    """Tiers with capacities in bytes, the compute tier first; links between two of them."""

    capacity: Mapping[str, int]
    links: Mapping[tuple[str, str], AlphaBeta]

    def __post_init__(self) -> None:
        """Refuse a link of an unknown tier, and a tier without a way to the first one."""
        if not self.capacity:
            raise ValueError("a topology needs a tier.")
        for link in self.links:
            if unknown := set(link) - set(self.capacity):
                raise ValueError(f"link {link} names no tier: {sorted(unknown)}.")
        for tier in self.capacity:
            self.path(tier, 1)

    def path(self, tier: str, num_bytes: int) -> list[tuple[str, str]]:
        """Return the links of the fastest way from a tier to the compute tier."""
        home = next(iter(self.capacity))
        reached: dict[str, tuple[float, list[tuple[str, str]]]] = {home: (0.0, [])}
        for _ in self.capacity:  # Bellman–Ford: the few tiers need nothing cleverer
            for link, fit in self.links.items():
                for here, there in (link, link[::-1]):
                    if here in reached:
                        cost = reached[here][0] + fit.seconds(num_bytes)
                        if there not in reached or cost < reached[there][0]:
                            reached[there] = (cost, [*reached[here][1], link])
        if tier not in reached:
            raise ValueError(f"there is no way from {tier} to {home}.")
        return reached[tier][1]
