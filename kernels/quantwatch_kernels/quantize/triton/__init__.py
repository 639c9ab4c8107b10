"""Triton twins of the CPU kernels, registered as back end `triton` of the same operators.

Kernel modules are imported by the first call only: Triton is optional, takes seconds to import, and
decides at import whether kernels are compiled or interpreted.
"""
