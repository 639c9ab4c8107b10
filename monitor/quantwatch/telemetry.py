"""Small shared instruments: canonical digests, run ids, the record of the environment."""

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_LIBRARIES = ("quantwatch", "torch", "transformers", "accelerate", "gguf", "numpy", "tokenizers")


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


def environment() -> dict[str, Any]:
    """Return versions, CPU, threads, driver, GPUs and commit: causes of a drift, never identity."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "cpu": _cpu(),
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


def _cpu() -> dict[str, Any]:
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
