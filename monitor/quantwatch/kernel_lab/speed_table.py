"""The table of `quantwatch kernels bench`."""

from collections.abc import Sequence

from quantwatch.kernel_lab.tables.model import Cell, Column, Table
from quantwatch.store.kernels import KernelSpeed


def speeds_table(speeds: Sequence[KernelSpeed]) -> Table:
    """Return one row per operator, back end and shape; notes name what is slower than bfloat16."""
    columns = (
        Column("operator", "operator"),
        Column("backend", "back end"),
        Column("variant", "weights"),
        Column("rows", "rows"),
        Column("outputs", "outputs"),
        Column("inputs", "inputs"),
        Column("ratio", "× bf16 F.linear", ".2f"),
        Column("ratio_low", "95 % from", ".2f"),
        Column("ratio_high", "to", ".2f"),
        Column("microseconds", "µs", ".0f"),
        Column("baseline_microseconds", "µs of bf16", ".0f"),
        Column("answered", "computed by another back end"),
    )
    rows = tuple(map(_row, speeds))
    threads = ", ".join(sorted({str(speed.threads) for speed in speeds}))
    notes = (
        f"{threads} thread(s), activations in bfloat16, everything a call costs included",
        "ratios of interleaved calls; absolute times of a shared machine move by a factor of two",
        *slower_notes(speeds),
    )
    return Table("Speed against bfloat16 F.linear", columns, rows, notes)


def slower_notes(speeds: Sequence[KernelSpeed]) -> tuple[str, ...]:
    """Return a note per operator and back end on the shapes where its ratio is below 1, or one
    that says there are none. A ratio whose interval reaches 1 is marked by a question mark.
    """
    shapes: dict[str, list[str]] = {}
    for speed in speeds:
        if not speed.ratio >= 1:
            rows, outputs, inputs = speed.shape
            sure = "" if speed.ratio_high < 1 else "?"
            place = f"{rows} × {inputs} → {outputs} ({speed.ratio:.2f}{sure})"
            name = f"{speed.operator} {speed.backend} {speed.variant}"
            shapes.setdefault(name, []).append(place)
    if not shapes:
        return ("nothing is slower than bfloat16 F.linear",)
    return tuple(f"slower than bfloat16: {name} at {', '.join(at)}" for name, at in shapes.items())


def _row(speed: KernelSpeed) -> tuple[Cell, ...]:
    rows, outputs, inputs = speed.shape
    return (
        *(speed.operator, speed.backend, speed.variant),
        *(rows, outputs, inputs),
        *(speed.ratio, speed.ratio_low, speed.ratio_high),
        *(1e6 * speed.seconds, 1e6 * speed.baseline_seconds),
        speed.message or None,
    )
