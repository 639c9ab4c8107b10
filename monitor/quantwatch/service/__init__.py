"""Everything of `quantwatch start` in one process: threads, signals, metrics endpoint."""
