"""What the commands of `quantwatch kernels plan` do with their options."""

from pathlib import Path

from quantwatch.cli.laboratory import check_out
from quantwatch.cli.laboratory import deliver as deliver_table
from quantwatch.cli.session import Session
from quantwatch.errors import UserError
from quantwatch.kernel_lab import plan_tables
from quantwatch.kernel_lab.plan_files import naming, size_in_bytes
from quantwatch.kernel_lab.tables.model import Table
from quantwatch_kernels.planning.alpha_beta import GB
from quantwatch_kernels.planning.bandwidth import Rule
from quantwatch_kernels.planning.kv_bytes import KVPages
from quantwatch_kernels.planning.parallel import Layer
from quantwatch_kernels.planning.roofline import Ceilings


def deliver(session: Session, table: Table, out: Path | None) -> None:
    """Write a plan to a file, or to stdout."""
    check_out(out)
    deliver_table(session, table, out)


def ceilings(gb_per_s: float, gflop_per_s: float) -> Ceilings:
    """Return measured ceilings from what was typed."""
    with naming("--gb-per-s and --gflop-per-s"):
        return Ceilings(gb_per_s * GB, gflop_per_s * 1e9)


def pareto(
    samples: Path,
    shape: tuple[int, ...],
    budget: str | None,
    epsilon: float,
    *,
    length_counts: bool,
) -> Table:
    """Run `kernels plan pareto`; `shape` is that of `KVPages`, in its order."""
    with naming("the KV cache"):
        pages = KVPages(*shape)
    with naming("--budget"):
        most = None if budget is None else size_in_bytes(budget)
    return plan_tables.pareto_table(samples, pages, most, epsilon, length_counts=length_counts)


def parallel(
    samples: Path, sizes: tuple[float, ...], measured: Ceilings, devices: int, tokens: str
) -> Table:
    """Run `kernels plan parallel`; `sizes` are those of `Layer`, in its order."""
    with naming("the layer"):
        layer = Layer(*sizes)  # type: ignore[arg-type]
    try:
        counts = [int(word) for word in tokens.split(",")]
    except ValueError as error:
        raise UserError(f"--tokens {tokens!r}: whole numbers with commas, as 1,8,64") from error
    return plan_tables.parallel_table(samples, layer, measured, devices, counts)


def bandwidth(samples: Path, peak: Path, above: float, in_a_row: int) -> Table:
    """Run `kernels plan bandwidth`."""
    with naming("--above and --samples"):
        rule = Rule(above, in_a_row)
    return plan_tables.bandwidth_table(samples, peak, rule)
