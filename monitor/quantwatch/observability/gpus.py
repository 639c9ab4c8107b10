"""What the GPUs did during a run, by NVML: memory, load, clocks, throttling, ECC, driver.

Telemetry never fails a run. What a card, a driver or a container doesn't tell is `not available`
with the reason, never 0. Cards are named by UUID: NVML counts them otherwise than CUDA does.
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from quantwatch.observability.visible import UUID, visible_handles

EVERY_S = 1.0
LONGEST_CALL_S = 5.0
"""How long the end of a run waits for a driver that doesn't answer."""
_THROTTLES = {
    "nvmlClocksThrottleReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "thermal, by software",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "thermal, by hardware",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksThrottleReasonSyncBoost": "sync boost",
}


class GpuWatch:
    """Samples GPUs in a thread while its body runs; `summary` tells what was seen.

    `nvml` is the module pynvml, or a fake; None imports it.
    """

    def __init__(
        self, nvml: Any = None, *, env: Mapping[str, str] = os.environ, every_s: float = EVERY_S
    ) -> None:
        self._nvml, self._env, self._every_s = nvml, env, every_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._reason: str | None = None
        self._driver: str | None = None
        self._cards: dict[str, _Card] = {}
        self._renewed = False
        self._open = False

    def __enter__(self) -> "GpuWatch":
        if self._begin():
            self._thread = threading.Thread(target=self._watch, name="gpu-telemetry", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join(LONGEST_CALL_S)
        if self._thread.is_alive():
            self._reason = "the driver does not answer"
        elif self._open:
            self._quietly(self._nvml.nvmlShutdown)

    def summary(self) -> dict[str, Any]:
        """Return what was seen by GPU UUID, or why there is nothing: plain JSON."""
        found: dict[str, Any] = {}
        if self._reason is not None:
            found["not_available"] = self._reason
        if self._driver is not None:
            found["driver"] = self._driver
        if self._cards:
            found["gpus"] = {uuid: card.summary() for uuid, card in self._cards.items()}
        return found

    def _begin(self) -> bool:
        """Open the library and the cards; say whether there is anything to watch."""
        try:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
        # Whatever a driver raises: telemetry is worth less than the run.
        except Exception as error:  # noqa: BLE001
            self._reason = _words(error)
            return False
        self._open = True
        return self._find_cards()

    def _find_cards(self) -> bool:
        try:
            self._driver = as_text(self._nvml.nvmlSystemGetDriverVersion())
            handles = visible_handles(self._nvml, self._env, _uuids_of_torch())
        except Exception as error:  # noqa: BLE001
            self._reason = _words(error)
            return False
        for uuid, handle in handles.items():
            self._cards.setdefault(uuid, _Card()).handle = handle
        if not handles:
            self._reason = "no visible GPU"
        return bool(handles)

    def _watch(self) -> None:
        while True:
            for card in self._cards.values():
                card.sample(self._nvml)
            if all(card.is_lost for card in self._cards.values()) and not self._renew():
                return
            if self._stop.wait(self._every_s):
                return

    def _renew(self) -> bool:
        """Open the library once more: containers lose their devices on `daemon-reload`."""
        if self._renewed:
            self._reason = "lost: " + next(iter(self._cards.values())).last_reason()
            return False
        self._renewed = True
        self._quietly(self._nvml.nvmlShutdown)
        self._open = False
        return self._begin()

    def _quietly(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001
            self._reason = self._reason or _words(error)


class _Card:
    """What one card said, quantity by quantity; a quantity it doesn't tell has a reason."""

    def __init__(self) -> None:
        self.handle: Any = None
        self._name: str | None = None
        self._series: dict[str, list[float]] = {}
        self._reasons: dict[str, str] = {}
        self._throttles: set[str] = set()
        self.is_lost = False

    def sample(self, nvml: Any) -> None:
        """Ask for everything once."""
        answers = [self._ask(nvml, name, ask) for name, ask in _QUESTIONS.items()]
        self.is_lost = not any(answers)

    def last_reason(self) -> str:
        """Return why the newest question had no answer."""
        return list(self._reasons.values())[-1]

    def summary(self) -> dict[str, Any]:
        """Return name, quantities and what is not available."""
        found: dict[str, Any] = {} if self._name is None else {"name": self._name}
        for name, values in self._series.items():
            found[name] = _summed(name, values)
        if "throttle_reasons" not in self._reasons:
            found["throttle_reasons"] = sorted(self._throttles)
        missing = {k: v for k, v in self._reasons.items() if k not in self._series}
        return found | ({"not_available": missing} if missing else {})

    def _ask(self, nvml: Any, name: str, ask: Callable[[Any, Any], Any]) -> bool:
        try:
            self._note(nvml, name, ask(nvml, self.handle))
        except Exception as error:  # noqa: BLE001
            self._reasons[name] = _words(error)
            return False
        self._reasons.pop(name, None)
        return True

    def _note(self, nvml: Any, name: str, answer: Any) -> None:
        if name == "name":
            self._name = as_text(answer)
        elif name == "throttle_reasons":
            self._throttles |= {w for flag, w in _THROTTLES.items() if answer & _flag(nvml, flag)}
        else:
            self._series.setdefault(name, []).append(float(answer))


def as_text(value: str | bytes) -> str:
    """Return text; the deprecated package `pynvml` answers in bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _flag(nvml: Any, name: str) -> int:
    return int(getattr(nvml, name, 0))


def _summed(name: str, values: list[float]) -> dict[str, float]:
    """Errors are counted over the run; everything else has a mean and its extremes."""
    if name.startswith("ecc_"):
        return {"during": values[-1] - values[0], "total": values[-1]}
    return {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _uuids_of_torch() -> list[str] | None:
    """Return the UUIDs that CUDA sees, in its order; None while torch doesn't use CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    count = range(torch.cuda.device_count())
    found = [str(torch.cuda.get_device_properties(index).uuid) for index in count]
    return [uuid if UUID.match(uuid) else f"GPU-{uuid}" for uuid in found]


_QUESTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "name": lambda nvml, card: nvml.nvmlDeviceGetName(card),
    "memory_used_bytes": lambda nvml, card: nvml.nvmlDeviceGetMemoryInfo(card).used,
    "memory_total_bytes": lambda nvml, card: nvml.nvmlDeviceGetMemoryInfo(card).total,
    "utilisation_percent": lambda nvml, card: nvml.nvmlDeviceGetUtilizationRates(card).gpu,
    "sm_clock_mhz": lambda nvml, card: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, card: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM),
    "temperature_celsius": lambda nvml, card: nvml.nvmlDeviceGetTemperature(
        card, nvml.NVML_TEMPERATURE_GPU
    ),
    "power_watts": lambda nvml, card: nvml.nvmlDeviceGetPowerUsage(card) / 1000,
    "throttle_reasons": lambda nvml, card: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card),
    "ecc_corrected": lambda nvml, card: nvml.nvmlDeviceGetTotalEccErrors(
        card, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_AGGREGATE_ECC
    ),
    "ecc_uncorrected": lambda nvml, card: nvml.nvmlDeviceGetTotalEccErrors(
        card, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
    ),
}
"""What is asked of every card; each may be refused alone."""
