"""Kernels run on poisoned memory, and each test counts its own fallbacks."""

from collections.abc import Iterator

import pytest

from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.registry import clear_fallbacks
from quantwatch_kernels.testing import poison_empty


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    clear_fallbacks()
    workspace.clear()
    with poison_empty("quantwatch_kernels"):
        yield
    workspace.clear()
