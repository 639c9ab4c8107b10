"""Kernel cases put together by operator and back end, on both databases."""

import math
from dataclasses import replace

import pytest
from tests.monitor.store.test_kernel_cases import BATCH, CASE

from quantwatch.errors import UserError
from quantwatch.store import kernels
from quantwatch.store.kernel_groups import Remarks, cases_where, groups_of, remarks_of
from quantwatch.store.kernels import KernelCase
from quantwatch.store.session import Database

HALF = replace(CASE, error=0.7e-3, fallbacks=())
ABSENT = replace(
    CASE, backend="triton", status="not applicable", error=9.0, message="no GPU",
    fallbacks=(("aten", "no GPU", 1), ("aten", "odd", 2)),
)  # fmt: skip


def test_counts_reasons_and_fallbacks(db: Database) -> None:
    """Catches a back end that is judged by the error of the one that answered for it."""
    kernels.insert_cases(db, BATCH, [HALF, replace(CASE, fallbacks=()), ABSENT, ABSENT])
    here, absent = groups_of(db, BATCH.id)

    assert (here.operator, here.backend, here.num_passed, here.num_cases) == (
        "int8_linear", "aten", 2, 2,
    )  # fmt: skip
    assert here.worst_share == pytest.approx(0.5)
    assert (absent.num_not_applicable, absent.worst_share) == (2, None)
    # One that says nothing is left out.
    assert remarks_of(db, BATCH.id) == {
        ("int8_linear", "triton"): Remarks(6, (("no GPU", 2),)),
    }


SHARES: dict[str, tuple[KernelCase, float | None]] = {
    "exact, and nothing else is allowed": (replace(HALF, error=0.0, tolerance=0.0), 0.0),
    "off, and nothing is allowed": (replace(HALF, error=1e-9, tolerance=0.0), math.inf),
    "more than a float holds": (replace(HALF, error=1e300, tolerance=1e-300), math.inf),
    "a fraction of the largest": (replace(HALF, error=1e308, tolerance=10.0), 1e307),
    "almost infinite": (replace(HALF, error=1e300, tolerance=1e-8), 1e308),
    "less than a float holds": (replace(HALF, error=1e-300, tolerance=1e300), 0.0),
    "smallest ones": (replace(HALF, error=5e-324, tolerance=5e-324), 1.0),
    "infinite": (replace(HALF, error=math.inf, status="failed"), math.inf),
    "not a number": (replace(HALF, error=math.nan, status="failed"), math.inf),
    "nothing to compare": (replace(HALF, error=None, status="failed"), None),
}


@pytest.mark.parametrize(("case", "share"), SHARES.values(), ids=SHARES)
def test_share_of_the_tolerance(db: Database, case: KernelCase, share: float | None) -> None:
    """Catches a division by zero, and an infinite error that SQL's NULL hides."""
    kernels.insert_cases(db, BATCH, [case])
    assert groups_of(db, BATCH.id)[0].worst_share == (
        share if share is None else pytest.approx(share)
    )


def test_cases_are_chosen_by_their_values(db: Database) -> None:
    """Catches the first rows of a batch instead of the first that fit."""
    failed = replace(HALF, status="failed", layout="expanded", message="off")
    kernels.insert_cases(db, BATCH, [HALF, failed, ABSENT])

    assert cases_where(db, BATCH.id, 5, status="failed") == (failed,)
    assert cases_where(db, BATCH.id, 5, backend="triton") == (ABSENT,)
    assert cases_where(db, BATCH.id, 5, operator=HALF.operator, backend="triton") == (ABSENT,)
    assert cases_where(db, BATCH.id, 5, operator="another") == ()
    assert len(cases_where(db, BATCH.id, 2)) == 2
    assert failed.name == "int8-channel/aten/1x64x576/bfloat16/expanded"


def test_an_unknown_batch(db: Database) -> None:
    """Catches a batch that retention took away and that now looks empty."""
    with pytest.raises(UserError, match="no batch of kernel cases"):
        groups_of(db, "01Z")
    with pytest.raises(UserError, match="no batch of kernel cases"):
        remarks_of(db, "01Z")
