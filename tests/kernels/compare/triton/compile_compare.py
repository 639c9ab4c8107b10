"""Compile the measuring kernels for a GPU that isn't there: see `tests.kernels.compiling`."""

from tests.kernels.compiling import Kernel, tell

from quantwatch_kernels.compare.triton import lens

CONSTANTS = {"HELD": 8, "TOP": 5, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_D": 64}


def kernels(dtype: str) -> dict[str, Kernel]:
    """Kernels with their constants and the types of what isn't a number."""
    x = f"*{dtype}"
    types = {"h": x, "g": x, "w": x, "sums": "*fp64", "top": "*fp32", "other": "*fp32",
             "top_ids": "*i32", "SCALE": "fp32", "CAP": "fp32"}  # fmt: skip
    return {
        "lens": (lens._lens, {**CONSTANTS, "HAS_CAP": False}, types),
        "lens, soft-capped": (lens._lens, {**CONSTANTS, "HAS_CAP": True}, types),
    }


if __name__ == "__main__":
    tell(kernels)
