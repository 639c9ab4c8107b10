"""Nsight Compute's CSV → time, bytes and FLOPs of each launch.

Both forms of `ncu --csv` are read. `--page raw`: one row per launch, a column per metric, the row
below the header holds the units. `--page details`: one row per launch and metric ("Metric Name",
"Metric Unit", "Metric Value"). Other lines (`==PROF== …`, what the program prints) are skipped.
Units are decimal (Kbyte = 1000 bytes). Numbers may have thousands separators; the other way round
(27.595.520, 65,77), as some locales write them, is refused rather than misread.

Needed: duration, DRAM bytes (summed, or read and written, or a rate, which is multiplied by the
duration) and instruction counts of add, mul and fma per thread (an fma is two FLOPs; packed half
instructions count once). Tensor-core operations are added where they were collected, those of the
dense path alone not again. The tool's percentages are of theoretical peaks and are not used. A
launch without one of the three is an error that names the metric to collect.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping

from quantwatch_kernels.planning.roofline import KernelTime

__all__ = ["parse_ncu_csv"]

_NAME = "Kernel Name"
_UNITS = {
    "": 1.0, "inst": 1.0, "ops": 1.0, "byte": 1.0, "byte/second": 1.0, "byte/s": 1.0,
    "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0,
    "nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "second": 1.0,
}  # fmt: skip
_PREFIX = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIME = ("gpu__time_duration.sum", "Duration")
_BYTES = ("dram__bytes.sum",)
_HALVES = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_RATES = ("dram__bytes.sum.per_second",)
_SASS = "__sass_thread_inst_executed_op_"
_FLOPS = {
    f"{_SASS}{width}{op}_pred_on.sum": 2.0 if op == "fma" else 1.0
    for width in "fdh"
    for op in ("add", "mul", "fma")
}
_UNIT_OF_WORK = ("smsp", "sm")
"""The same counts by two names: of a partition, or of the whole multiprocessor."""
_TENSOR = re.compile(r"sm__ops_path_tensor_src_(?!.*sparsity)\w+\.sum")
_PLAIN = re.compile(r"\d{1,3}(,\d{3})*(\.\d+)?|\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)
Metrics = dict[str, tuple[str, str]]
"""Metric → (value, unit) as written."""
Launch = tuple[str, str, Metrics]
"""Kernel, grid, metrics."""


def parse_ncu_csv(text: str) -> list[KernelTime]:
    """Return the launches in their order.

    Raises ValueError naming the line, launch or metric when something is missing or no number.
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('"ID"') and _NAME in line]
    if not starts:
        raise ValueError(f'no header with "ID" and "{_NAME}": run ncu with --csv.')
    # Every line of the tool's CSV begins with a quote; what a program prints in between doesn't.
    rows = list(csv.DictReader(line for line in lines[starts[0] :] if line.startswith('"')))
    header = set(rows[0]) if rows else set()
    launches = list(_details(rows) if "Metric Name" in header else _raw(rows))
    if not launches:
        raise ValueError("the CSV has a header but no launch.")
    return [_launch(*launch) for launch in launches]


def _details(rows: Iterable[Mapping[str, str]]) -> Iterator[Launch]:
    found: dict[tuple[str, ...], Launch] = {}
    for row in rows:
        key = (row.get("Process ID", ""), row["ID"])
        _, _, metrics = found.setdefault(key, (row[_NAME], row.get("Grid Size", ""), {}))
        name, value = row["Metric Name"], row["Metric Value"]
        # Rules have no metric. "Memory Throughput" exists twice: in % and in bytes per second.
        if name and value and "%" not in row["Metric Unit"]:
            metrics[name] = (value, row["Metric Unit"])
    yield from found.values()


def _raw(rows: list[dict[str, str]]) -> Iterator[Launch]:
    units = rows[0] if rows and not rows[0]["ID"] else {}
    for row in rows[1:] if units else rows:
        metrics = {key: (value, units.get(key, "")) for key, value in row.items() if value}
        yield row[_NAME], row.get("Grid Size", ""), metrics


def _launch(name: str, grid: str, metrics: Metrics) -> KernelTime:
    def values(keys: Iterable[str]) -> list[float]:
        return [_number(name, key, *metrics[key]) for key in keys if key in metrics]

    seconds = values(_TIME)
    if not seconds:
        raise ValueError(f"{name}: no duration; collect gpu__time_duration.sum.")
    moved = values(_BYTES)[:1]
    if not moved and all(key in metrics for key in _HALVES):
        moved = [sum(values(_HALVES))]
    if not moved:
        rates = values((*_RATES, "Memory Throughput"))
        moved = [rate * seconds[0] for rate in rates[:1]]
    if not moved:
        raise ValueError(f"{name}: no DRAM bytes; collect dram__bytes.sum.")
    flops = values(key for key in metrics if _TENSOR.fullmatch(key))
    for key, each in _FLOPS.items():
        flops += [each * n for n in values(unit + key for unit in _UNIT_OF_WORK)[:1]]
    if not flops:
        raise ValueError(f"{name}: no instruction counts; collect smsp{_SASS}ffma_pred_on.sum.")
    return KernelTime(name, seconds[0], moved[0], sum(flops), shape=grid)


def _number(name: str, metric: str, value: str, unit: str) -> float:
    scale = _UNITS.get(unit)
    if scale is None and unit[1:] in _UNITS:
        scale = _PREFIX.get(unit[:1])
    if scale is None or not _PLAIN.fullmatch(value):
        raise ValueError(f"{name}: {metric} is {value!r} in {unit!r}: no such number or unit.")
    return float(value.replace(",", "")) * scale
