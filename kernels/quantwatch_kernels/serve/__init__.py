"""Serving: KV cache, attention, mixture of experts, fused operators, batching and planning."""
