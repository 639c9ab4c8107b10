"""What `kernels plan` shows: the planning functions over files of samples, as tables."""

from collections.abc import Sequence
from pathlib import Path

from quantwatch.errors import UserError
from quantwatch.kernel_lab.plan_files import (
    AMOUNT,
    NUMBER,
    POSITIVE,
    WHOLE,
    WORD,
    naming,
    read_samples,
    read_text,
)
from quantwatch.kernel_lab.tables.model import Cell, Column, Table
from quantwatch_kernels.planning.alpha_beta import GB, GIB, AlphaBeta, fit_alpha_beta
from quantwatch_kernels.planning.bandwidth import (
    Rule,
    Sample,
    bottlenecks,
    measured_peak,
    utilisation,
)
from quantwatch_kernels.planning.kv_bytes import KVPages
from quantwatch_kernels.planning.ncu_csv import parse_ncu_csv
from quantwatch_kernels.planning.parallel import (
    Device,
    Layer,
    all_reduce_cost,
    all_to_all_cost,
    as_transfer,
    sequence_parallel,
    sequence_parallel_from,
    tensor_parallel,
)
from quantwatch_kernels.planning.pareto import (
    epsilon_front,
    fronts,
    measured_point,
    surely_beaten,
)
from quantwatch_kernels.planning.roofline import Ceilings, classify, merged
from quantwatch_kernels.planning.torch_trace import parse_torch_trace

_COLLECTIVES = {"all_reduce": all_reduce_cost, "all_to_all": all_to_all_cost}
_MOST_TOKENS = 8192
_US = 1e6


def pareto_table(
    samples: Path, pages: KVPages, budget: int | None, epsilon: float, *, length_counts: bool
) -> Table:
    """Return every measured batch × length that fits `budget` bytes of KV, with its front."""
    wanted = {"batch": WHOLE, "length": WHOLE, "tokens": WHOLE, "seconds": POSITIVE}
    repeats: dict[tuple[int, int, int], list[float]] = {}
    for row in read_samples(samples, wanted):
        key = (row["batch"], row["length"], row["tokens"])
        repeats.setdefault(key, []).append(row["seconds"])
    points = []
    for (batch, length, tokens), seconds in sorted(repeats.items()):
        with naming(f"{samples}, batch {batch}, length {length}"):
            points.append(measured_point((batch, length), seconds, tokens, pages))
    fitting = [p for p in points if budget is None or p.kv_bytes <= budget]
    if not fitting:
        least = min(p.kv_bytes for p in points)
        raise UserError(f"nothing fits {budget:,} bytes of KV; the smallest needs {least:,}")
    vectors = [p.gains(length_counts=length_counts) for p in fitting]
    ranks, beaten = fronts(vectors), surely_beaten(fitting, length_counts=length_counts)
    with naming("--epsilon"):
        chosen = epsilon_front(vectors, epsilon)
    rows = tuple(
        (p.batch, p.length, p.throughput.value, p.throughput.low, p.throughput.high,
         p.latency_s.value * 1e3, p.latency_s.low * 1e3, p.latency_s.high * 1e3,
         p.kv_bytes, ranks[i], beaten[i], i in chosen)
        for i, p in enumerate(fitting)
    )  # fmt: skip
    notes = [
        "Front 0 is beaten by nothing at the medians; intervals cover the median by 95 % or more."
    ]
    if budget is not None:
        large = len(points) - len(fitting)
        notes.append(f"{large} of {len(points)} shapes don't fit {budget:,} bytes.")
    return Table("Batch × length", _PARETO, rows, tuple(notes))


_PARETO = (
    Column("batch", "batch"), Column("length", "length"),
    Column("tokens_per_s", "tokens/s", ".1f"), Column("tokens_per_s_low", "from", ".1f"),
    Column("tokens_per_s_high", "to", ".1f"), Column("latency_ms", "latency, ms", ".3f"),
    Column("latency_ms_low", "from", ".3f"), Column("latency_ms_high", "to", ".3f"),
    Column("kv_bytes", "KV bytes", ","), Column("front", "front"),
    Column("surely_beaten", "beaten beyond noise"), Column("kept", "kept by ε"),
)  # fmt: skip


def parallel_table(
    samples: Path, layer: Layer, ceilings: Ceilings, devices: int, tokens: Sequence[int]
) -> Table:
    """Return both splits' times per layer for each number of tokens, and where they cross."""
    links = _links(samples)
    device = Device(
        ceilings.flops_per_s, ceilings.bytes_per_s, links["all_reduce"], links["all_to_all"]
    )
    rows: list[tuple[Cell, ...]] = []
    with naming(f"{devices} devices"):
        for count in tokens:
            tensor = tensor_parallel(layer, device, count, devices)
            sequence = sequence_parallel(layer, device, count, devices)
            better = "tensor" if sum(tensor) < sum(sequence) else "sequence"
            rows.append((count, *(s * _US for s in (*tensor, *sequence)), better))
        start = sequence_parallel_from(layer, device, devices, _MOST_TOKENS)
    crossing = "slower there" if start is None else f"no slower from {start} tokens on"
    fits = (_fit_note(name, fit) for name, fit in links.items())
    notes = (f"Sequence parallel, up to {_MOST_TOKENS} tokens: {crossing}.", *fits)
    return Table(f"One layer on {devices} devices", _PARALLEL, tuple(rows), notes)


_PARALLEL = (
    Column("tokens", "tokens"), Column("tensor_send_us", "tensor: sends, µs", ".2f"),
    Column("tensor_work_us", "works, µs", ".2f"),
    Column("sequence_send_us", "sequence: sends, µs", ".2f"),
    Column("sequence_work_us", "works, µs", ".2f"), Column("faster", "faster"),
)  # fmt: skip


def _links(samples: Path) -> dict[str, AlphaBeta]:
    wanted = {"collective": WORD, "devices": WHOLE, "bytes": AMOUNT, "seconds": POSITIVE}
    rows = read_samples(samples, wanted)
    if other := [r["collective"] for r in rows if r["collective"] not in _COLLECTIVES]:
        allowed = " or ".join(_COLLECTIVES)
        raise UserError(f"{samples}: collective {other[0]!r}; it is {allowed}")
    links = {}
    for name, cost in _COLLECTIVES.items():
        mine = [row for row in rows if row["collective"] == name]
        with naming(f"{samples}, {name}"):
            if bad := [row["devices"] for row in mine if row["devices"] < 2]:
                raise ValueError(f"a collective has 2 devices or more, not {bad[0]}")
            links[name] = fit_alpha_beta(
                as_transfer(cost(row["bytes"], row["devices"]), row["seconds"]) for row in mine
            )
    return links


def _fit_note(name: str, fit: AlphaBeta) -> str:
    rate = fit.bytes_per_s
    return (
        f"{name}: {fit.alpha_s * _US:.2f} µs + bytes at {rate / GB:.3f} GB/s "
        f"({rate / GIB:.3f} GiB/s); samples are {fit.residual:.1%} off on average."
    )


def bandwidth_table(samples: Path, copies: Path, rule: Rule) -> Table:
    """Return the times during which memory bandwidth was the bottleneck."""
    measured = read_samples(copies, {"bytes": POSITIVE, "seconds": POSITIVE})
    with naming(copies):
        peak = measured_peak([(row["bytes"], row["seconds"]) for row in measured])
    read = read_samples(samples, {"at_s": NUMBER, "bytes": AMOUNT, "seconds": POSITIVE})
    series = [Sample(row["at_s"], row["bytes"], row["seconds"]) for row in read]
    with naming(samples):
        shares, episodes = utilisation(series, peak), bottlenecks(series, peak, rule)
    rows = tuple(
        (series[e.first].at_s, series[e.last].at_s, e.samples, e.mean, e.highest) for e in episodes
    )
    notes = (
        f"Peak, measured: {peak / GB:.3f} GB/s ({peak / GIB:.3f} GiB/s).",
        f"Above {rule.above:.0%} of it in {rule.samples} consecutive samples; "
        f"{len(series)} samples, the highest {max(shares):.1%}.",
    )
    return Table("Bandwidth bottlenecks", _BANDWIDTH, rows, notes)


_BANDWIDTH = (
    Column("from_s", "from, s", ".3f"), Column("to_s", "to, s", ".3f"),
    Column("samples", "samples"), Column("mean", "mean share", ".1%"),
    Column("highest", "highest", ".1%"),
)  # fmt: skip


def roofline_table(profile: Path, ceilings: Ceilings, threshold: float) -> Table:
    """Return what bounds each kernel of an Nsight Compute CSV or a torch profiler trace (.json)."""
    text, unknown, trace = read_text(profile), dict[str, float](), profile.suffix == ".json"
    with naming(profile):
        if trace:
            kernels, unknown = parse_torch_trace(text)
        else:
            kernels = parse_ncu_csv(text)
        verdicts = [classify(k, ceilings, threshold, cached=trace) for k in merged(kernels)]
    rows = tuple(
        (v.kernel.name, v.kernel.shape, v.kernel.launches, v.kernel.seconds * _US, v.bound,
         v.memory_share, v.compute_share, v.intensity, v.roof_share)
        for v in verdicts
    )  # fmt: skip
    rest = sorted(unknown.items(), key=lambda item: -item[1])
    of = ", ".join(f"{name} {seconds * _US:.1f} µs" for name, seconds in rest[:8])
    notes = [f"Ridge: {ceilings.ridge:.2f} FLOPs per byte; latency-bound below {threshold:.0%}."]
    if trace:
        notes.append("Bytes are the least a trace's shapes allow; above 100% a cache served them.")
    if rest:
        notes.append(f"Not classified, cost unknown: {len(rest)} operators: {of}.")
    return Table(f"What bounds {profile.name}", _ROOFLINE, rows, tuple(notes))


_ROOFLINE = (
    Column("kernel", "kernel"), Column("shape", "shape"), Column("launches", "launches"),
    Column("time_us", "µs", ".2f"), Column("bound", "bound by"),
    Column("memory_share", "of bandwidth", ".1%"),
    Column("compute_share", "of FLOP rate", ".1%"), Column("intensity", "FLOPs/byte", ".3f"),
    Column("roof_share", "of its roof", ".1%"),
)  # fmt: skip
