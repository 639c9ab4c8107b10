"""The tables of `quantwatch kernels table`, one module each; `registry.py` lists them."""
