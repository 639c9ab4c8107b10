"""Triton kernels in the interpreter, on the CPU; on a GPU (`make test-gpu`) the same, compiled."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")
