"""Have glibc give freed blocks back while models are streamed.

glibc maps large blocks and returns them when they are freed, but each one that is freed makes it
take blocks of up to that size (32 MB) from its heap from then on. There the states that are kept of
every tap lie between buffers that live for one product, and the heap grows with every layer by more
than is kept: where memory is for three layers, for nothing. Naming a threshold, even the one glibc
begins with, ends that. Given up: pages of fresh blocks are cleared by the system each time; and the
process stays so, since glibc offers no way back.
"""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
_INITIAL_BYTES = 128 << 10


def return_freed_blocks() -> None:
    """Fix the size from which glibc maps blocks, unless the environment names one already.

    Does nothing under another C library: the numbers are the same, the memory is that library's.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    named = "MALLOC_MMAP_THRESHOLD_" in os.environ or "malloc.mmap_threshold" in tunables
    if not named and platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        # The other grew too: it is how much that is free at the heap's end glibc keeps.
        for setting in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            library.mallopt(setting, _INITIAL_BYTES)
