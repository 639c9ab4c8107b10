"""Quantize and compare kernels: knows tensors, nothing of monitoring."""
