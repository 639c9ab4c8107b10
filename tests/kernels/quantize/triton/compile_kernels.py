"""Compile the Triton kernels for a GPU that isn't there, and print what they multiply with.

Prints JSON: kernel and dtype → the matrix instructions of its PTX. Run in a process of its own,
because Triton decides at import whether it interprets.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quantwatch_kernels.quantize.triton import hadamard, int4_matmul, int8_matmul, rows

POINTERS = {
    "codes": "*i8", "scales": "*fp32", "row_scales": "*fp32", "zeros": "*fp32", "sums": "*i32",
    "bias": "*fp32", "packed": "*u8", "signs": "*i8", "right": "*i8", "scale": "fp32",
}  # fmt: skip
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "HAS_ZERO": True, "HAS_BIAS": True}
KERNELS: dict[str, tuple[Any, dict[str, Any], dict[str, str]]] = {
    "rows": (rows._quantize_rows, {"BLOCK": 1024}, {}),
    "int8": (int8_matmul._int8_matmul, BLOCKS, {"a": "*i8", "w": "*i8", "zeros": "*i32"}),
    "int4": (int4_matmul._int4_matmul, {**BLOCKS, "GROUP": 64}, {}),
    "hadamard": (hadamard._rotate, {"P": 64, "Q": 24, "PADDED_P": 64, "PADDED_Q": 32}, {}),
}


def instructions(name: str, dtype: str, capability: int) -> list[str]:
    """Compile down to machine code; return the kinds of matrix instruction in between."""
    kernel, constants, pointers = KERNELS[name]
    known = {**POINTERS, **pointers, "x": f"*{dtype}", "y": f"*{dtype}"}
    signature = {
        n: "constexpr" if n in constants else known.get(n, "i32") for n in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target, options = GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False}
    made = triton.compile(source, target=target, options=options)
    assert made.asm["cubin"]
    lines = (line.split()[0] for line in made.asm["ptx"].splitlines() if "mma" in line)
    return sorted({line for line in lines if line.startswith(("mma", "wgmma.mma_async"))})


def main() -> None:
    capability, *dtypes = sys.argv[1:]
    found = {f"{k} {d}": instructions(k, d, int(capability)) for k in KERNELS for d in dtypes}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
