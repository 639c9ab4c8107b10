"""The conformance grid as stored rows: what `quantwatch kernels test` runs."""

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from quantwatch.errors import UserError
from quantwatch.kernel_lab.tables.model import Cell, Column, Table
from quantwatch.models.opening import check_device
from quantwatch.store.kernels import KernelBatch, KernelCase, Kind, case_name
from quantwatch.telemetry import environment, new_run_id
from quantwatch_kernels.conformance.case import OpCase
from quantwatch_kernels.conformance.cases import all_cases
from quantwatch_kernels.conformance.run import CaseResult, cells, run_case, run_cases


def run_conformance(
    *,
    operator: str | None = None,
    case: str | None = None,
    device: str = "cpu",
    quick: bool = False,
    tell: Callable[[str], None] = lambda _line: None,
) -> tuple[KernelBatch, list[KernelCase]]:
    """Run every case (of one operator), or the one that is named, and return the batch.

    Raises UserError for an operator or a case that isn't there, ModelError for such a device.
    """
    check_device(device)
    started = datetime.now(UTC)
    if case is not None:
        cases = [_one(operator, case, device)]
        return batch_of("test", device, started, cases), cases
    cases = []
    for each in _chosen(operator):
        tell(f"{each.op.name} {each.variant}".rstrip())
        cases += [_stored(found) for found in run_cases([each], device=device, quick=quick)]
    return batch_of("test", device, started, cases), cases


def _one(operator: str | None, name: str, device: str) -> KernelCase:
    """Run the case of a name, which a failure's line and the dashboard show."""
    for case in _chosen(operator):
        for backend in case.op.backends:
            for ask in cells(case, device):
                dtype = str(ask.dtype).removeprefix("torch.")
                if case_name(case.variant, backend, ask.shape, dtype, ask.layout) == name:
                    return _stored(run_case(case, backend, ask))
    of = "" if operator is None else f" of {operator}"
    raise UserError(f"no case{of} is called {name!r}; it is VARIANT/BACKEND/SHAPE/DTYPE/LAYOUT")


def _chosen(operator: str | None) -> list[OpCase]:
    cases = [case for case in all_cases() if operator in (None, case.op.name)]
    if not cases:
        known = ", ".join(sorted({case.op.name for case in all_cases()}))
        raise UserError(f"no operator {operator!r}; there are {known}")
    return cases


def _stored(found: CaseResult) -> KernelCase:
    return KernelCase(**{name: getattr(found, name) for name in KernelCase.__slots__})


def batch_of(
    kind: Kind, device: str, started: datetime, cases: Sequence[KernelCase] = ()
) -> KernelBatch:
    """Return the batch of a call that ends now."""
    here = environment()
    commit = here["git_commit"]
    statuses = [case.status for case in cases]
    return KernelBatch(
        id=new_run_id(),
        kind=kind,
        device=device,
        git_sha=commit,
        environment=here,
        started_at=started,
        finished_at=datetime.now(UTC),
        num_passed=statuses.count("passed"),
        num_failed=statuses.count("failed"),
        num_not_applicable=statuses.count("not applicable"),
    )


def summary(cases: Sequence[KernelCase]) -> Table:
    """Return one row per operator and back end."""
    columns = (
        Column("operator", "operator"),
        Column("backend", "back end"),
        Column("passed", "passed"),
        Column("failed", "failed"),
        Column("not_applicable", "not applicable"),
        Column("error_of_tolerance", "largest error ÷ tolerance", ".2f"),
        Column("fallbacks", "fallbacks"),
        Column("reasons", "why not, or what failed"),
    )
    groups: dict[tuple[str, str], list[KernelCase]] = {}
    for case in cases:
        groups.setdefault((case.operator, case.backend), []).append(case)
    rows = tuple(_summary_row(*key, group) for key, group in groups.items())
    return Table("Kernel conformance", columns, rows)


def _summary_row(operator: str, backend: str, group: list[KernelCase]) -> tuple[Cell, ...]:
    statuses = [case.status for case in group]
    ratios = [
        _share(case.error, case.tolerance)
        for case in group
        if case.error is not None and case.status != "not applicable"
    ]
    reasons = list(dict.fromkeys(case.message for case in group if case.message))
    more = [f"and {len(reasons) - 3} more"] if len(reasons) > 3 else []
    return (
        operator,
        backend,
        *(statuses.count(status) for status in ("passed", "failed", "not applicable")),
        max(ratios, default=None),
        sum(count for case in group for _, _, count in case.fallbacks),
        "; ".join([*reasons[:3], *more]) or None,
    )


def _share(error: float, tolerance: float) -> float:
    """Return error ÷ tolerance; a tolerance of 0 allows 0 only."""
    if tolerance:
        return error / tolerance
    return 0.0 if error == 0 else math.inf
