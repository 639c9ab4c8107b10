"""Placement against brute force over every assignment of every item."""

import random
from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch_kernels.planning import offload
from quantwatch_kernels.planning.alpha_beta import AlphaBeta
from quantwatch_kernels.planning.offload import Group, place
from quantwatch_kernels.planning.topology import Topology

PCIE, NVLINK, DISK = AlphaBeta(10e-6, 1e-10), AlphaBeta(2e-6, 1e-11), AlphaBeta(1e-4, 1e-9)


def chain(gpu: int, host: int, disk: int = 10**12) -> Topology:
    links = {("gpu", "host"): PCIE, ("host", "disk"): DISK}
    return Topology({"gpu": gpu, "host": host, "disk": disk}, links)


def brute_force(
    groups: list[Group], topology: Topology, compute_s: float, *, overlap: bool
) -> float:
    """Try every assignment of single items; paths by trying every sequence of tiers."""
    items = [group for group in groups for _ in range(group.count)]
    tiers = list(topology.capacity)
    best = inf
    for choice in product(range(len(tiers)), repeat=len(items)):
        used = [
            sum(i.num_bytes for i, c in zip(items, choice, strict=True) if c == t)
            for t in range(len(tiers))
        ]
        if any(u > topology.capacity[tier] for u, tier in zip(used, tiers, strict=True)):
            continue
        busy = dict.fromkeys(topology.links, 0.0)
        for item, tier in zip(items, choice, strict=True):
            for link in fastest(topology, tiers[tier], item.num_bytes)[1]:
                busy[link] += item.moves * topology.links[link].seconds(item.num_bytes)
        took = max(compute_s, *busy.values()) if overlap else compute_s + sum(busy.values())
        best = min(best, took)
    return best


def fastest(
    topology: Topology, tier: str, size: int, seen: tuple[str, ...] = ()
) -> tuple[float, list[tuple[str, str]]]:
    if tier == next(iter(topology.capacity)):
        return 0.0, []
    found: tuple[float, list[tuple[str, str]]] = (inf, [])
    for link, fit in topology.links.items():
        if tier in link and (other := link[link[0] == tier]) not in (*seen, tier):
            rest = fastest(topology, other, size, (*seen, tier))
            found = min(found, (fit.seconds(size) + rest[0], [link, *rest[1]]))
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_placement_is_the_best_of_all(seed: int, overlap: bool) -> None:
    """Catches greedy choices: by size, by traffic, by traffic per byte."""
    rng = random.Random(seed)
    groups = [
        Group(name, rng.randint(1, 2), rng.randint(1, 9) * 10**6, rng.choice([0.0, 0.5, 1.0, 3.0]))
        for name in ("weights", "kv", "activations")[: rng.randint(1, 3)]
    ]
    topology = chain(rng.randint(0, 30) * 10**6, rng.randint(0, 30) * 10**6)
    compute = rng.choice([0.0, 1e-3])
    found = place(groups, topology, compute, overlap=overlap)
    assert found.step_s == pytest.approx(brute_force(groups, topology, compute, overlap=overlap))
    for group, counts in zip(groups, found.counts, strict=True):
        assert sum(counts) == group.count
    for tier, capacity in enumerate(topology.capacity.values()):
        assert (
            sum(c[tier] * g.num_bytes for g, c in zip(groups, found.counts, strict=True))
            <= capacity
        )


def test_greedy_by_traffic_per_byte_is_beaten() -> None:
    """A knapsack whose densest item leaves the room empty that two others would fill."""
    groups = [Group("dense", 1, 6, 7.0), Group("pair", 2, 5, 5.0)]
    links = {("gpu", "host"): AlphaBeta(0.0, 1.0)}
    found = place(groups, Topology({"gpu": 10, "host": 100}, links), 0.0)
    assert found.counts == ((0, 1), (2, 0))
    assert found.step_s == 42


def test_everything_fits() -> None:
    found = place([Group("weights", 30, 10**6)], chain(10**9, 10**9), 2e-3)
    assert found.counts == ((30, 0, 0),)
    assert found.step_s == 2e-3
    assert set(found.link_s.values()) == {0.0}


def test_overlap_hides_what_is_shorter() -> None:
    group, topology = Group("weights", 2, 10**7), chain(10**7, 10**9)
    moved = PCIE.seconds(10**7)
    assert place([group], topology, 1.0).step_s == 1.0
    assert place([group], topology, 1.0, overlap=False).step_s == pytest.approx(1.0 + moved)


def test_the_way_depends_on_the_size() -> None:
    """Catches a topology that is a table of rates: two hops are faster only for many bytes."""
    links = {
        ("gpu", "host"): PCIE,
        ("gpu", "peer"): NVLINK,
        ("peer", "host"): AlphaBeta(2e-5, 2e-11),
    }
    topology = Topology({"gpu": 1, "peer": 1, "host": 10**12}, links)
    assert topology.path("host", 1) == [("gpu", "host")]
    assert topology.path("host", 10**9) == [("gpu", "peer"), ("peer", "host")]


@pytest.mark.parametrize(
    ("groups", "compute", "words"),
    [
        ([Group("w", 1, 10**13)], 0.0, "w: 1 × .* fit nowhere"),
        ([Group("w", 0, 1)], 0.0, "count ≥ 1"),
        ([Group("w", 1, 1, -1.0)], 0.0, "moves ≥ 0"),
        ([Group("w", 1, 1, float("nan"))], 0.0, "moves ≥ 0"),
        ([Group("w", 1, 1)], -1.0, "compute_s"),
    ],
)
def test_bad_input(groups: list[Group], compute: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        place(groups, chain(10, 10), compute)


def test_bad_topologies() -> None:
    with pytest.raises(ValueError, match="no way from disk to gpu"):
        Topology({"gpu": 1, "disk": 1}, {})
    with pytest.raises(ValueError, match="names no tier"):
        Topology({"gpu": 1}, {("gpu", "moon"): PCIE})
    with pytest.raises(ValueError, match="needs a tier"):
        Topology({}, {})


def test_a_search_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a guess that passes for the best."""
    monkeypatch.setattr(offload, "_MOST_STATES", 5)
    with pytest.raises(ValueError, match="over 5 placements"):
        place([Group("w", 9, 1)], chain(100, 100), 0.0)
