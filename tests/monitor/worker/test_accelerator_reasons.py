"""What a device's errors mean for a run: not every one is a lack of memory."""

import pytest

from quantwatch.pipeline.reasons import reason_of


class AcceleratorError(RuntimeError):
    """As torch calls any error of a device."""


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (AcceleratorError("CUDA error: out of memory"), ("oom", True)),
        (OutOfMemoryError("Tried to allocate 2 GiB"), ("oom", True)),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), ("oom", True)),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), ("oom", True)),
        (
            AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
            ("gpu_unavailable", True),
        ),
        (AcceleratorError("CUDA error: GPU is lost"), ("gpu_unavailable", True)),
        (
            RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
            ("gpu_unavailable", True),
        ),
        (AcceleratorError("CUDA error: an illegal memory access"), ("internal", False)),
        (AcceleratorError("CUDA error: device-side assert triggered"), ("internal", False)),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ("internal", False)),
    ],
    ids=lambda value: str(value)[:48],
)
def test_what_a_device_says(error: Exception, expected: tuple[str, bool]) -> None:
    """Catches a broken GPU, or a kernel of ours, reported as a lack of memory."""
    assert reason_of(error) == expected
