"""Models larger than memory: one decoder layer at a time, from mapped files."""
