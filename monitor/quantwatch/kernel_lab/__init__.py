"""The laboratory of kernels and recipes: bounds, conformance, benchmarks and tables.

Like the pipeline it joins what otherwise never meets: models, prompts, kernels and the store.
"""
