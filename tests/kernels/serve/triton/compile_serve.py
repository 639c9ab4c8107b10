"""Compile the serving kernels for a GPU that isn't there: see `tests.kernels.compiling`."""

from tests.kernels.compiling import Kernel, tell

from quantwatch_kernels.serve.triton import (
    act_mul,
    int8_qk,
    kv_quantize,
    moe_gemm,
    paged_attention,
    rms_norm,
)

BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}
EXPERTS = {**BLOCKS, "GROUP": 64, "GROUP_X": 64, "SPAN": 64, "BITS": 4, "SIGNED": False}
PAGED = {"PAGE": 16, "GROUPS": 4, "D": 72, "PADDED_G": 16, "PADDED_D": 128, "BLOCK_N": 32}
SCORES = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 64}
CODED = {"codes": "*i8", "packed": "*u8", "zeros": "*u8", "fits": "*i8", "scales": "*fp32"}
FLOATS = {"eps": "fp32", "width": "fp32", "root": "fp32", "scaling": "fp32", "cap": "fp32"}


def kernels(dtype: str) -> dict[str, Kernel]:
    """Kernels with their constants and the types of their pointers."""
    x = f"*{dtype}"
    rows = {"x": x, "residual": x, "weight": x, "summed": x, "gate": x, "up": x}
    norm = {"HAS_RESIDUAL": True, "GEMMA": False, "BLOCK": 1024}
    pages = {"q": x, "k": x, "v": x, "out": "*fp32", "lse": "*fp32", "pages": "*i32",
             "first": "*i32", "ends": "*i32", "lows": "*i32"}  # fmt: skip
    plan = {"slots": "*i64", "experts": "*i64", "row_scales": "*fp32", "scales": "*fp16", "y": x}
    scores = {"q": "*i8", "k": "*i8", "y": "*fp32", "q_scales": "*fp32", "k_scales": "*fp32",
              "q_rest": "*fp16", "k_rest": "*fp16", "plain": "*fp32"}  # fmt: skip
    store = {"HALF": True, "BLOCK": 64, "GROUP": 64, "QMIN": 0, "BITS": 4, "QMAX": 15}
    product = {"GELU": True, "BLOCK": 1024}
    found: dict[str, Kernel] = {
        "norm": (rms_norm._add_rms_norm, {**norm, "CODES": False}, {**rows, "y": x}),
        "norm codes": (rms_norm._add_rms_norm, {**norm, "CODES": True}, {**rows, "y": "*i8"}),
        "act": (act_mul._act_mul, {**product, "CODES": False}, {**rows, "y": x}),
        "act codes": (act_mul._act_mul, {**product, "CODES": True}, {**rows, "y": "*i8"}),
        "kv4": (kv_quantize._kv_quantize, {**store, "SIGNED": False}, {"x": x, "scales": "*fp16"}),
        "paged": (paged_attention._paged_attention, {**PAGED, "HAS_CAP": True}, pages),
        "scores": (int8_qk._int8_qk, {**SCORES, "HAS_Q": False, "HAS_K": False}, scores),
        "scores, both": (int8_qk._int8_qk, {**SCORES, "HAS_Q": True, "HAS_K": True}, scores),
        "experts": (moe_gemm._moe_gemm, {**EXPERTS, "CODES": False}, {**plan, "x": x}),
        "experts codes": (moe_gemm._moe_gemm, {**EXPERTS, "CODES": True}, {**plan, "x": "*i8"}),
    }  # fmt: skip
    return {name: (k, c, {**CODED, **FLOATS, **types}) for name, (k, c, types) in found.items()}


if __name__ == "__main__":
    tell(kernels)
