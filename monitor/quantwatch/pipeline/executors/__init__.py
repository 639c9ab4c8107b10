"""Where the batches of a run are measured: here, in several processes, or on Ray's workers."""
