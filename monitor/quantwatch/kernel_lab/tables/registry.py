"""Which tables there are: one line adds one. A table's module is imported when it is asked for.

The module has `build(request: TableRequest) -> Table`.
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple

from quantwatch.errors import UserError
from quantwatch.kernel_lab.tables.model import Table, TableRequest

_HERE = "quantwatch.kernel_lab.tables"


class Entry(NamedTuple):
    """Where a table is built, and what it shows."""

    module: str
    shows: str
    takes_tasks: bool = False
    takes_model: bool = True
    """False: it is about something else, and `--model` changes nothing."""
    rescales: bool = True
    """Whether the model is taken off its grid first, which not every architecture allows."""


TABLES: dict[str, Entry] = {
    "allocation": Entry(f"{_HERE}.allocation", "formats by sensitivity, uniform and random"),
    "attention": Entry(
        f"{_HERE}.attention", "INT8 attention: error of each repair, KL", rescales=False
    ),
    "block-table": Entry(
        f"{_HERE}.block_table", "waste and neighbours of KV pages, by request", takes_model=False
    ),
    "blocks": Entry(
        f"{_HERE}.blocks", "KV pages before and after re-laying out", takes_model=False
    ),
    "calibration": Entry(f"{_HERE}.calibration", "which samples set static ranges, over seeds"),
    "eviction": Entry(
        f"{_HERE}.eviction", "LRU, LRU-2, SLRU, Belady on recorded traces", takes_model=False
    ),
    "group-size": Entry(f"{_HERE}.group_size", "int4 group sizes: bits, error, KL, speed"),
    "kv": Entry(f"{_HERE}.kv", "quantized KV caches: KL, bits, capacity", rescales=False),
    "ladder": Entry(f"{_HERE}.ladder", "the shipped recipes, 8.5 to 4 bits, beside llama.cpp"),
    "memory": Entry(
        f"{_HERE}.memory", "the int4 pipeline: bytes, accuracy kept, speed", takes_tasks=True
    ),
    "modules": Entry(f"{_HERE}.modules", "the int8 stage: module, precision, KL, speed"),
    "qat-ptq": Entry(f"{_HERE}.qat_ptq", "the last blocks trained in 3 bits, beside GPTQ"),
    "sensitivity": Entry(f"{_HERE}.sensitivity", "every module alone: KL, accuracy, entropy"),
    "strategy": Entry(
        f"{_HERE}.strategy",
        "KV caches: L2 error, first token, decay over 1,000s of tokens",
        rescales=False,
    ),
    "w4a4": Entry(f"{_HERE}.w4a4", "activations in 8 and 4 bits: smoothing, rotation, groups"),
}


def build(name: str, request: TableRequest) -> Table:
    """Return a table. Raises UserError naming those that exist, or that take multiple choice."""
    if name not in TABLES:
        raise UserError(f"no table {name!r}; there are {', '.join(sorted(TABLES))}")
    if request.tasks is not None and not TABLES[name].takes_tasks:
        takers = ", ".join(other for other, entry in TABLES.items() if entry.takes_tasks)
        raise UserError(
            f"table {name} has no multiple choice, so no tasks; those that do: {takers}"
        )
    builder: Callable[[TableRequest], Table] = importlib.import_module(TABLES[name].module).build
    return builder(request)
