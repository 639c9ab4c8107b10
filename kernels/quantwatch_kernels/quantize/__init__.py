"""Weights in fewer bits: recipes, scales and codes, packing, packed linear layers, whole models."""
