"""The reference's traces on disk: recorded on one night, read back on the others.

An entry is a folder, named by what its numbers depend on (`key`): a file of traces per batch, one
of noise floor observations per part, and a manifest with all checksums, written last. What is
stored is exact: a night that reads gives the numbers of one that runs the reference, bit for bit.
"""
