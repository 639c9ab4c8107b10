"""Metrics: the registry, statistics of per-token values, the culprit. Pure functions."""
