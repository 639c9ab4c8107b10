"""Triton twins of the serving operators, registered as back end `triton` beside the others.

As in `quantize.triton`, a kernel's module is imported by the first call only. None has run on a GPU
here: what is tested is their arithmetic in the interpreter, and that they compile.
"""
