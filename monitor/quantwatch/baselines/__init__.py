"""Baselines: when two runs can be compared, what differs, and runs as files."""
