"""C++ helpers, built on this machine on first use.

A library is built by the C++ compiler (`CXX`, which may have arguments, else g++) for this CPU and
kept in the user's cache under the hash of source, headers beside it, flags and CPU; one that can't
be loaded is built anew. Nothing of torch is compiled against, so any torch can load it
(`torch.utils.cpp_extension` compiles torch's headers and binds the result to one release). Without
a compiler `why_not_built` says so; callers then use their torch path, counted as a fallback.

A library that works in several threads (`spread.h`) is given torch's, where those are OpenMP's;
elsewhere it works in the calling one.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import platformdirs
import torch

__all__ = ["NATIVE_ERRORS", "library", "why_not_built", "why_one_thread"]

NATIVE_ERRORS = (OSError, subprocess.SubprocessError)
"""What `library` raises where there is no compiler, or where it refuses the source."""

_BUILD_TIMEOUT_S = 120
_SEAL_BYTES = 32
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")


def library(source: Path, *flags: str) -> ctypes.CDLL:
    """Return the library of a C++ source, built with `flags` in addition if it isn't kept yet.

    Raises OSError or SubprocessError when it can't be built.
    """
    path = _path(source, flags)
    try:
        return _loaded(path)
    except OSError:  # it isn't there, or not as it was built
        _build(source, flags, path)
    return _loaded(path)


def _loaded(path: Path) -> ctypes.CDLL:
    kept = path.read_bytes()
    if _seal(kept[:-_SEAL_BYTES]) != kept[-_SEAL_BYTES:]:
        raise OSError(f"{path} is damaged")  # a part of a library would end this process
    found = ctypes.CDLL(str(path))
    if hasattr(found, "spread_on"):
        found.spread_on(ctypes.c_void_p(_team()))
    return found


def _seal(built: bytes) -> bytes:
    """Return what is put behind a library's own bytes, where no loader looks."""
    return hashlib.sha256(built).digest()


@functools.cache
def _team() -> int | None:
    """Return the address of the function that runs work on torch's threads, None without one.

    Looked up in torch's library and what it depends on: another OpenMP in this process has other
    threads.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        run = ctypes.CDLL(str(path)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(run, ctypes.c_void_p).value


def why_one_thread() -> str | None:
    """Say why libraries work in the calling thread alone, None when they use torch's."""
    return None if _team() else "torch's threads are not those of GNU's OpenMP"


def why_not_built(source: Path, *flags: str) -> str | None:
    """Say why a source can't be built here, None when it can."""
    try:
        library(source, *flags)
    except NATIVE_ERRORS as error:
        detail = getattr(error, "stderr", None) or str(error)
        return f"{source.name} can't be built: {detail.strip()[:200]}"
    return None


def _path(source: Path, flags: tuple[str, ...]) -> Path:
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else [platform.processor()]
    about = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    headers = (header.read_text() for header in sorted(source.parent.glob("*.h")))
    key = [source.read_text(), *headers, *_FLAGS, *flags, *_compiler(), platform.machine(), *about]
    digest = hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
    folder = Path(platformdirs.user_cache_dir("quantwatch")) / "native"
    return folder / f"{source.stem}-{digest}.so"


def _compiler() -> list[str]:
    given = os.environ.get("CXX", "")
    try:
        command = shlex.split(given) or ["g++"]
    except ValueError as error:
        raise FileNotFoundError(f"CXX is no command: {given!r}: {error}") from error
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no C++ compiler {command[0]!r}")
    return command


def _build(source: Path, flags: tuple[str, ...], path: Path) -> None:
    """Compile into a file of its own, then rename: another process may do the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        subprocess.run(
            [*_compiler(), *_FLAGS, *flags, str(source), "-o", str(made)],
            check=True, capture_output=True, text=True, errors="replace", timeout=_BUILD_TIMEOUT_S,
        )  # fmt: skip
        built = made.read_bytes()
        made.write_bytes(built + _seal(built))
        made.replace(path)
