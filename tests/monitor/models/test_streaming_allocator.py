"""Memory that is freed while a model is streamed goes back to the system."""

import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

CODE = textwrap.dedent(
    """
    import ctypes, sys
    from pathlib import Path
    import torch
    from quantwatch.config.schema import VariantConfig
    from quantwatch.models.loading import load_variant

    class Info(ctypes.Structure):
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Info

    def mapped(size):
        before = libc.mallinfo2().hblks
        block = torch.empty(size, dtype=torch.uint8)
        return libc.mallinfo2().hblks - before

    folder = Path(sys.argv[1])
    torch.empty(24 << 20, dtype=torch.uint8)  # freed at once, as buffers of a product are
    # The second block is larger: what the heap still has free of the first is used as before.
    for streamed, size in ((False, 8 << 20), (True, 20 << 20)):
        load_variant(
            "m", VariantConfig(model=str(folder)), base_dir=folder, cache_dir=folder / "cache",
            streamed=streamed,
        )
        print(mapped(size))
    """
)
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps blocks so")


@glibc
@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, ["0", "1"]),
        ({"MALLOC_MMAP_THRESHOLD_": str(32 << 20)}, ["0", "0"]),
        ({"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={32 << 20}"}, ["0", "0"]),
    ],
    ids=["glibc's own", "named", "named as a tunable"],
)
def test_large_blocks_are_mapped_once_a_model_is_streamed(
    environment: dict[str, str], wanted: list[str], make_folder: Any
) -> None:
    """Catches a heap that keeps what each layer frees, and a user's own threshold overruled."""
    folder: Path = make_folder()
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == wanted
