"""A torch profiler trace (`export_chrome_trace`, record_shapes=True) → time, bytes, FLOPs per op.

The trace holds times and input shapes. FLOPs follow from shapes for products (2·M·N·K) and are
counted one per element for the element-wise operators below. Bytes are the least that can move:
each input read once and the output written once, from memory or from a cache. A CPU operator's time
is all of its call; with GPU kernels in the trace it is that of the kernels that carry its External
id. Operators of unknown cost (and composites such as aten::linear, whose parts are listed) aren't
classified: their names and time come back beside.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from quantwatch_kernels.planning.roofline import KernelTime

__all__ = ["Trace", "parse_torch_trace"]

_BYTES = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "signed char": 1,
    "unsigned char": 1, "bool": 1, "int": 4, "long int": 8,
}  # fmt: skip
_ELEMENTWISE = frozenset(
    f"aten::{name}"
    for name in (
        "add", "add_", "sub", "mul", "mul_", "div", "div_", "neg", "exp", "rsqrt", "silu",
        "sigmoid", "gelu", "copy_", "where",
    )
)  # fmt: skip
_FREE = frozenset({"aten::copy_", "aten::where"})
"""Moves, no arithmetic."""
_PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
}
_NEEDED = frozenset({"name", "dur", "args"})
Shapes = Sequence[Sequence[int]]


class Trace(NamedTuple):
    """Operators of known cost, and seconds of the others by name (nested time counted twice)."""

    kernels: list[KernelTime]
    unknown: dict[str, float]


def parse_torch_trace(text: str) -> Trace:
    """Return the operators of a trace in their order.

    Raises ValueError for a text that is no trace, and for one without shapes.
    """
    try:
        events = json.loads(text)["traceEvents"]
    except (ValueError, KeyError, TypeError):
        events = None
    if not isinstance(events, list):
        raise ValueError("no JSON with traceEvents: use export_chrome_trace.")
    operators = [e for e in events if e.get("cat") == "cpu_op" and e.keys() >= _NEEDED]
    if not any(event["args"].get("Input Dims") for event in operators):
        raise ValueError("the trace has no input shapes: profile with record_shapes=True.")
    on_gpu: Counter[int] = Counter()
    for event in events:
        if event.get("cat") == "kernel" and event.keys() >= _NEEDED:
            on_gpu[event["args"].get("External id")] += event["dur"]
    kernels, unknown = list[KernelTime](), Counter[str]()
    for event in operators:
        own = on_gpu[event["args"].get("External id")] if on_gpu else event["dur"]
        work = _work(event["name"], event["args"])
        if work is None:
            unknown[event["name"]] += own
        elif own > 0:  # with GPU kernels: an operator that launched none did its work elsewhere
            shape = "×".join(map(str, filter(None, event["args"]["Input Dims"])))
            kernels.append(KernelTime(event["name"], own * 1e-6, *work, shape=shape))
    return Trace(kernels, {name: microseconds * 1e-6 for name, microseconds in unknown.items()})


def _work(name: str, args: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return (bytes, FLOPs), or None where the cost isn't known."""
    shapes: Shapes = args.get("Input Dims", ())
    types: Sequence[str] = args.get("Input type", ())
    if name in _PRODUCTS:
        return _product(shapes, types, *_PRODUCTS[name])
    if name not in _ELEMENTWISE or not shapes or types[0] not in _BYTES:
        return None
    tensors = [(s, _BYTES[t]) for s, t in zip(shapes, types, strict=True) if t in _BYTES]
    elements = prod(_broadcast([shape for shape, _ in tensors]))
    # copy_ reads its second input only; its first one is the output.
    read = tensors[1:] if name == "aten::copy_" else tensors
    moved = sum(prod(shape) * size for shape, size in read) + elements * tensors[0][1]
    return float(moved), 0.0 if name in _FREE else float(elements)


def _product(
    shapes: Shapes, types: Sequence[str], left: int, right: int
) -> tuple[float, float] | None:
    size = _BYTES.get(types[left])
    if size is None:
        return None
    a, b = shapes[left], shapes[right]
    outputs = prod(a[:-1]) * b[-1]
    added = prod(shapes[0]) if left else 0
    return float((prod(a) + prod(b) + added + outputs) * size), 2.0 * outputs * a[-1]


def _broadcast(shapes: Shapes) -> list[int]:
    rank = max(map(len, shapes))
    filled = [[1] * (rank - len(shape)) + list(shape) for shape in shapes]
    return [
        1 if 1 in sizes and max(sizes) == 1 else max(sizes) for sizes in zip(*filled, strict=True)
    ]
