"""The table of conformance cases: one line adds an operator, or a kind of weights to one."""

from quantwatch_kernels.conformance.attention import attention_cases
from quantwatch_kernels.conformance.case import OpCase
from quantwatch_kernels.conformance.compare import compare_cases
from quantwatch_kernels.conformance.fused import fused_cases
from quantwatch_kernels.conformance.integer import integer_cases
from quantwatch_kernels.conformance.linear import linear_cases
from quantwatch_kernels.conformance.moe import moe_cases
from quantwatch_kernels.conformance.rows import row_cases
from quantwatch_kernels.conformance.sketched import sketch_cases
from quantwatch_kernels.conformance.w8a8 import w8a8_case
from quantwatch_kernels.quantize.int4_linear import INT4_LINEAR
from quantwatch_kernels.quantize.int8_linear import INT8_LINEAR
from quantwatch_kernels.quantize.packed_linear import LOWBIT_LINEAR

__all__ = ["all_cases"]


def all_cases() -> tuple[OpCase, ...]:
    """Return every case, operators in the order of the table."""
    return (
        *compare_cases(),
        *sketch_cases(),
        *linear_cases(INT8_LINEAR, "int8-channel"),
        *linear_cases(INT8_LINEAR, "int8-tensor"),
        *linear_cases(INT8_LINEAR, "int8-g64"),
        *linear_cases(INT8_LINEAR, "uint8-channel"),
        *linear_cases(INT4_LINEAR, "int4-g32"),
        *linear_cases(INT4_LINEAR, "int4-g64"),
        *linear_cases(INT4_LINEAR, "uint4-g64"),
        *linear_cases(INT4_LINEAR, "uint4-g64", float_zero=True),
        *linear_cases(INT4_LINEAR, "int4-channel"),
        *linear_cases(LOWBIT_LINEAR, "int2-g16"),
        *linear_cases(LOWBIT_LINEAR, "int3-g64"),
        *linear_cases(LOWBIT_LINEAR, "uint5-g128"),
        *linear_cases(LOWBIT_LINEAR, "int6-channel"),
        *linear_cases(LOWBIT_LINEAR, "uint7-tensor"),
        w8a8_case(),
        *integer_cases(),
        *row_cases(),
        *fused_cases(),
        *moe_cases(),
        *attention_cases(),
    )
