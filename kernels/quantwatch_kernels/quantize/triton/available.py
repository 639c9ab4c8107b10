"""Whether a Triton kernel can run on a tensor, said before anything of Triton is imported.

Kernels run on CUDA devices, or anywhere under the interpreter (TRITON_INTERPRET=1), which shows
right numbers and wrong masks but no speed, no races, no TF32 and no bfloat16: its `tl.dot`
multiplies bit patterns (bug log 41) and its cast to bfloat16 truncates.
"""

import functools
import importlib.util
import os

from torch import Tensor

__all__ = ["interpreted", "triton_why_not"]


def interpreted() -> bool:
    """Return whether Triton would interpret kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton_why_not(x: Tensor, *, bfloat16: bool = False) -> str | None:
    """Say why kernels can't run on `x`, None when they can.

    `bfloat16`: whether the kernel multiplies or stores bfloat16; reading it is fine everywhere.
    """
    if not _installed():
        return "triton is not installed (pip install 'quantwatch[gpu]')"
    if interpreted():
        if bfloat16:
            return "Triton's interpreter neither multiplies nor rounds bfloat16 rightly"
        return (
            None if x.device.type == "cpu" else "Triton's interpreter is on and takes CPU tensors"
        )
    return None if x.is_cuda else f"Triton kernels run on CUDA devices, not {x.device.type}"
