"""Compile the quantizing kernels for a GPU that isn't there: see `tests.kernels.compiling`."""

from tests.kernels.compiling import Kernel, tell

from quantwatch_kernels.quantize.triton import hadamard, int4_matmul, int8_matmul, rows

POINTERS = {
    "codes": "*i8", "scales": "*fp32", "row_scales": "*fp32", "zeros": "*fp32", "sums": "*i32",
    "bias": "*fp32", "packed": "*u8", "signs": "*i8", "right": "*i8", "scale": "fp32",
}  # fmt: skip
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "HAS_ZERO": True, "HAS_BIAS": True}


def kernels(dtype: str) -> dict[str, Kernel]:
    """Kernels with their constants and the types of what isn't a number."""
    types = {**POINTERS, "x": f"*{dtype}", "y": f"*{dtype}"}
    int8 = {**types, "a": "*i8", "w": "*i8", "zeros": "*i32"}
    rotation = {"P": 64, "Q": 24, "PADDED_P": 64, "PADDED_Q": 32}
    return {
        "rows": (rows._quantize_rows, {"BLOCK": 1024}, types),
        "int8": (int8_matmul._int8_matmul, BLOCKS, int8),
        "int4": (int4_matmul._int4_matmul, {**BLOCKS, "GROUP": 64}, types),
        "hadamard": (hadamard._rotate, rotation, types),
    }


if __name__ == "__main__":
    tell(kernels)
