"""`kernels plan offload`: a TOML of tiers, links and groups → the placement, as a table.

compute_s = 0.020            # of one step
[tiers]                      # the one that computes first
gpu = "24 GiB"
host = "64 GiB"
[[links]]
between = ["gpu", "host"]
samples = "pcie.csv"         # bytes,seconds; relative to this file
[[groups]]
name = "layers"
count = 32
size = "436 MB"              # of one
moves = 1                    # per step, when not on the first tier
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantwatch.errors import UserError
from quantwatch.kernel_lab.plan_files import (
    AMOUNT,
    POSITIVE,
    naming,
    read_samples,
    read_toml,
    size_in_bytes,
)
from quantwatch.kernel_lab.tables.model import Cell, Column, Table
from quantwatch_kernels.planning.alpha_beta import (
    GB,
    GIB,
    AlphaBeta,
    Transfer,
    fit_alpha_beta,
)
from quantwatch_kernels.planning.offload import Group, place
from quantwatch_kernels.planning.topology import Topology

_ROOT = {"compute_s": (int, float), "tiers": dict, "links": list, "groups": list}
_LINK = {"between": list, "samples": str}
_GROUP = {"name": str, "count": int, "size": str, "moves": (int, float)}


def offload_table(plan: Path, *, overlap: bool) -> Table:
    """Return the fastest placement of what a plan's file describes."""
    document = read_toml(plan)
    _checked(plan, document, _ROOT)
    topology = _topology(plan, document)
    groups = [_group(plan, entry) for entry in document["groups"]]
    with naming(plan):
        found = place(groups, topology, document["compute_s"], overlap=overlap)
    columns = (
        Column("group", "group"), Column("size", "bytes of one", ","),
        *(Column(tier, f"on {tier}") for tier in topology.capacity),
    )  # fmt: skip
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (group.name, group.num_bytes, *counts)
        for group, counts in zip(groups, found.counts, strict=True)
    )
    busy = (_link_note(link, topology.links[link], s) for link, s in found.link_s.items())
    how = "beside computing" if overlap else "after computing"
    return Table(
        "Offload", columns, rows, (f"A step takes {found.step_s:.6f} s, moves {how}.", *busy)
    )


def _link_note(link: tuple[str, str], fit: AlphaBeta, busy_s: float) -> str:
    rate = fit.bytes_per_s
    return (
        f"{link[0]}–{link[1]}: {fit.alpha_s * 1e6:.2f} µs + bytes at {rate / GB:.3f} GB/s "
        f"({rate / GIB:.3f} GiB/s); busy {busy_s:.6f} s."
    )


def _topology(plan: Path, document: Mapping[str, Any]) -> Topology:
    links = {}
    for entry in document["links"]:
        _checked(plan, entry, _LINK)
        between = tuple(entry["between"])
        if len(between) != 2 or not all(isinstance(tier, str) for tier in between):
            raise UserError(f"{plan}: between is {entry['between']!r}; it names two tiers")
        if between in links or between[::-1] in links:
            raise UserError(f"{plan}: the link {'–'.join(between)} comes twice")
        path = plan.parent / entry["samples"]
        rows = read_samples(path, {"bytes": AMOUNT, "seconds": POSITIVE})
        with naming(path):
            links[between] = fit_alpha_beta(Transfer(r["bytes"], r["seconds"]) for r in rows)
    with naming(plan):
        tiers = {name: size_in_bytes(size) for name, size in document["tiers"].items()}
        return Topology(tiers, links)


def _group(plan: Path, entry: Mapping[str, Any]) -> Group:
    _checked(plan, entry, _GROUP)
    with naming(f"{plan}, group {entry['name']}"):
        return Group(entry["name"], entry["count"], size_in_bytes(entry["size"]), entry["moves"])


def _checked(plan: Path, found: Any, wanted: Mapping[str, Any]) -> None:
    """Refuse a table with a missing key, an unknown one, or another type."""
    if not isinstance(found, dict):
        raise UserError(f"{plan}: {found!r} is no table of {', '.join(wanted)}")
    if unknown := [key for key in found if key not in wanted]:
        raise UserError(f"{plan}: unknown key {unknown[0]!r}; there are {', '.join(wanted)}")
    for key, kind in wanted.items():
        if key not in found:
            raise UserError(f"{plan}: {key} is missing; it needs {', '.join(wanted)}")
        if not isinstance(found[key], kind) or isinstance(found[key], bool):
            raise UserError(f"{plan}: {key} is {found[key]!r}, which has the wrong type")
