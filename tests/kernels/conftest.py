"""Kernels run on poisoned memory, and each test counts its own fallbacks."""

import os
from collections.abc import Iterator

import pytest
import torch

from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.registry import clear_fallbacks
from quantwatch_kernels.testing import poison_empty

if not torch.cuda.is_available():
    # Read when Triton is first imported, so it can't wait for the tests of Triton kernels.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    clear_fallbacks()
    workspace.clear()
    with poison_empty("quantwatch_kernels"):
        yield
    workspace.clear()
