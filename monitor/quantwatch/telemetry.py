"""Small shared instruments: canonical digests, run ids, the record of the environment."""

import errno
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quantwatch.errors import ResourceError, UserError

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
LIBRARIES = ("quantwatch", "torch", "transformers", "accelerate", "gguf", "numpy", "tokenizers")
"""Whose versions are kept with every run."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no NaN: the form that digests are taken of."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def canonical_sha(value: Any) -> str:
    """Return the SHA-256 (hex) of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def new_run_id() -> str:
    """Return a ULID: 48 bits of milliseconds, 80 random bits, Crockford base 32, sorts by time."""
    number = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -5, -5))


def disk_is_full(error: BaseException) -> bool:
    """Say whether an error means that no more may be written: disk, quota or size limit."""
    return isinstance(error, OSError) and error.errno in _FULL


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all; links are followed, devices and pipes are written to.

    Raises ResourceError on a full disk, UserError when the file can't be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", errors="replace")
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        raise _unwritable(path, error) from error


def check_writable(path: Path) -> None:
    """Raise UserError or ResourceError when `write_whole` can't succeed; nothing is written."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not path.exists() or path.is_file():
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass
    except OSError as error:
        raise _unwritable(path, error) from error


def _replace(path: Path, text: str) -> None:
    """Write beside the target and rename, so that nobody ever reads half a file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", errors="replace")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> UserError | ResourceError:
    kind = ResourceError if disk_is_full(error) else UserError
    return kind(f"{path}: cannot be written: {error.strerror}")


def environment() -> dict[str, Any]:
    """Return versions, CPU, threads, driver, GPUs and commit: causes of a drift, never identity."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": libraries(),
        "cpu": cpu(),
        "gpus": gpus(),
        "git_commit": _git_commit(),
    }


def gpus() -> list[dict[str, Any]] | str:
    """Return the NVIDIA GPUs by NVML, or the reason why there is nothing to tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError as error:
        return f"not available: {error}"
    except pynvml.NVMLError as error:
        return f"not available: {error}"
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        driver = pynvml.nvmlSystemGetDriverVersion()
        return [
            {
                "uuid": pynvml.nvmlDeviceGetUUID(handle),
                "name": pynvml.nvmlDeviceGetName(handle),
                "driver": driver,
            }
            for handle in handles
        ]
    except pynvml.NVMLError as error:
        return f"not available: {error}"
    finally:
        pynvml.nvmlShutdown()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def libraries(names: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Return the versions of installed packages."""
    return {name: _version(name) for name in names}


def cpu() -> dict[str, Any]:
    """Describe the CPU; torch's view of it only when torch is loaded anyway."""
    record: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count()}
    model = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    if model:
        record["model"] = model[0].split(":", 1)[1].strip()
    torch = sys.modules.get("torch")
    if torch is not None:
        record["capability"] = torch.backends.cpu.get_cpu_capability()
        record["threads"] = torch.get_num_threads()
    return record


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _git_commit() -> str | None:
    """Return the commit of the checkout this code runs from; None when it is installed."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
