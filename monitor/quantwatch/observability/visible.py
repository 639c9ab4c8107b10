"""Which GPUs this process may use: CUDA_VISIBLE_DEVICES as CUDA reads it."""

import re
from collections.abc import Mapping
from typing import Any

UUID = re.compile(r"(GPU|MIG)-", re.IGNORECASE)


def visible_handles(
    nvml: Any, env: Mapping[str, str], uuids: list[str] | None = None
) -> dict[str, Any]:
    """Return NVML's handles of the visible GPUs by UUID, in order.

    `uuids` are those that CUDA itself reports, which beat the variable: a number in it counts in
    CUDA's order, which is NVML's only with CUDA_DEVICE_ORDER=PCI_BUS_ID or a single kind of card.
    Raises what NVML raises.
    """
    if uuids is not None:
        return {uuid: nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids}
    handles = _all_handles(nvml)
    wanted = wanted_devices(env.get("CUDA_VISIBLE_DEVICES"), list(handles))
    return {u: handles[u] if u in handles else nvml.nvmlDeviceGetHandleByUUID(u) for u in wanted}


def cuda_devices(env: Mapping[str, str], nvml: Any = None) -> list[str]:
    """Return the CUDA devices of this process as torch names them; [] without a usable driver."""
    try:
        if nvml is None:
            import pynvml

            nvml = pynvml
        nvml.nvmlInit()
        try:
            count = len(visible_handles(nvml, env))
        finally:
            nvml.nvmlShutdown()
    # Whatever a driver raises: then there is nothing to measure on.
    except Exception:  # noqa: BLE001
        return []
    return [f"cuda:{index}" for index in range(count)]


def wanted_devices(variable: str | None, uuids: list[str]) -> list[str]:
    """Return the UUIDs that a CUDA_VISIBLE_DEVICES chooses among all; CUDA stops at a bad entry."""
    if variable is None:
        return uuids
    chosen: list[str] = []
    for entry in (part.strip() for part in variable.split(",")):
        found = _find(entry, uuids)
        if found is None or found in chosen:
            break
        chosen.append(found)
    return chosen


def _find(entry: str, uuids: list[str]) -> str | None:
    """Return the UUID that an entry means: a number, or a UUID that may be shortened."""
    if entry.isdecimal():
        return uuids[int(entry)] if int(entry) < len(uuids) else None
    if not UUID.match(entry):
        return None
    if entry.upper().startswith("MIG-"):
        return entry
    matching = [uuid for uuid in uuids if uuid.lower().startswith(entry.lower())]
    return matching[0] if len(matching) == 1 else None


def _all_handles(nvml: Any) -> dict[str, Any]:
    count = range(nvml.nvmlDeviceGetCount())
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in count]
    return {_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
