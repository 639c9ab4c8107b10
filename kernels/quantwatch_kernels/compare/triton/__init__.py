"""Twins of the measuring operators for GPUs."""
