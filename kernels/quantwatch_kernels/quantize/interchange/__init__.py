"""Weights in the layouts of other projects, one file each: exact both ways, or an error."""
