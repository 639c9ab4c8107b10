"""Watch two models compute the same tokens: hooks, comparison, sinks."""
