"""GPU telemetry against a fake NVML that refuses whatever real ones were seen to refuse (B40)."""

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quantwatch.observability import gpus
from quantwatch.observability.gpus import GpuWatch
from quantwatch.observability.visible import wanted_devices

UUIDS = ["GPU-aaaa-1", "GPU-bbbb-2"]


class NVMLError(Exception):
    """Stands for pynvml's own error."""


class FakeNvml:
    """Two cards. `refuse[name]` is what a function raises; `samples` counts what was asked."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_AGGREGATE_ECC = 1
    nvmlClocksThrottleReasonSwPowerCap = 4  # noqa: N815
    nvmlClocksThrottleReasonHwThermalSlowdown = 64  # noqa: N815

    def __init__(self, *, as_bytes: bool = False) -> None:
        self.refuse: dict[str, Exception] = {}
        self.calls: list[str] = []
        self.as_bytes = as_bytes
        self.used = 0
        self.sampled = threading.Event()
        self.enough = 3
        self.heals_on_init = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml") or name.startswith("nvmlClocks"):
            raise AttributeError(name)
        return lambda *given: self._answer(name, *given)

    def _answer(self, name: str, *given: Any) -> Any:
        self.calls.append(name)
        if name == "nvmlInit" and self.heals_on_init and self.calls.count("nvmlInit") > 1:
            self.refuse.clear()
        if name == "nvmlDeviceGetTotalEccErrors" and self.calls.count(name) >= 4 * self.enough:
            self.sampled.set()
        if name in self.refuse:
            raise self.refuse[name]
        return getattr(self, f"_{name}", lambda *_: None)(*given)

    def _text(self, value: str) -> Any:
        return value.encode() if self.as_bytes else value

    def _nvmlDeviceGetCount(self) -> int:
        return 2

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return UUIDS.index(uuid) if uuid in UUIDS else 7

    def _nvmlDeviceGetUUID(self, card: int) -> Any:
        return self._text(UUIDS[card])

    def _nvmlSystemGetDriverVersion(self) -> Any:
        return self._text("570.12")

    def _nvmlDeviceGetName(self, card: int) -> Any:
        return self._text("NVIDIA H200")

    def _nvmlDeviceGetMemoryInfo(self, card: int) -> Any:
        self.used += 10
        return SimpleNamespace(used=self.used, total=1000)

    def _nvmlDeviceGetUtilizationRates(self, card: int) -> Any:
        return SimpleNamespace(gpu=50)

    def _nvmlDeviceGetClockInfo(self, card: int, kind: int) -> int:
        return 1980

    def _nvmlDeviceGetTemperature(self, card: int, kind: int) -> int:
        return 60

    def _nvmlDeviceGetPowerUsage(self, card: int) -> int:
        return 350_000

    def _nvmlDeviceGetCurrentClocksThrottleReasons(self, card: int) -> int:
        return 4

    def _nvmlDeviceGetTotalEccErrors(self, card: int, kind: int, counter: int) -> int:
        return 3 + self.used // 100


def watched(nvml: Any, visible: str | None = None, *, wait: bool = True) -> dict[str, Any]:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with GpuWatch(nvml, env=env, every_s=0.001) as watch:
        if wait:
            assert nvml.sampled.wait(5)
    found = watch.summary()
    json.dumps(found, allow_nan=False)
    return found


@pytest.mark.parametrize("as_bytes", [False, True], ids=["text", "bytes-of-the-old-package"])
def test_everything_is_told_by_uuid(as_bytes: bool) -> None:
    """Catches quantities that nobody samples, and names in bytes (vllm#7649)."""
    found = watched(FakeNvml(as_bytes=as_bytes))
    assert found["driver"] == "570.12"
    assert list(found["gpus"]) == UUIDS
    card = found["gpus"][UUIDS[0]]
    assert card["name"] == "NVIDIA H200"
    assert card["memory_used_bytes"]["max"] > card["memory_used_bytes"]["min"]
    assert card["power_watts"]["mean"] == 350
    assert card["throttle_reasons"] == ["power cap"]
    assert card["ecc_corrected"]["total"] >= 3
    assert "not_available" not in card


@pytest.mark.parametrize(
    "name",
    [
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetName",
    ],
)
def test_what_is_not_supported_is_not_available_never_zero(name: str) -> None:
    """Catches 0 % on a card that does not tell its load (dask/distributed#8739)."""
    nvml = FakeNvml()
    nvml.refuse[name] = NVMLError("Not Supported")
    card = watched(nvml)["gpus"][UUIDS[0]]
    assert set(card["not_available"].values()) == {"Not Supported"}
    assert not set(card["not_available"]) & (set(card) - {"not_available"})
    assert len([key for key in card if key != "not_available"]) >= 7


@pytest.mark.parametrize(
    "words", ["NVML Shared Library Not Found", "Driver/library version mismatch", "Unknown Error"]
)
def test_without_a_driver_there_is_a_reason(words: str) -> None:
    """Catches a check that fails because the machine has no NVIDIA driver."""
    nvml = FakeNvml()
    nvml.refuse["nvmlInit"] = NVMLError(words)
    assert watched(nvml, wait=False) == {"not_available": words}
    assert "nvmlShutdown" not in nvml.calls


def test_an_error_that_is_none_of_nvml_does_not_fail_a_run_either() -> None:
    """Catches an AttributeError of a shadowed or foreign package `pynvml`."""
    nvml = SimpleNamespace(nvmlInit=lambda: None)
    found = watched(nvml, wait=False)
    assert "nvmlSystemGetDriverVersion" in found["not_available"]


def test_a_lost_card_is_asked_once_more_then_left_alone() -> None:
    """Catches a thread that hammers a dead driver for hours (nvidia-docker#1730)."""
    nvml = FakeNvml()
    names = [name for name in dir(FakeNvml) if name.startswith("_nvmlDeviceGet")]
    asked = [name[1:] for name in names if not name.endswith(("Count", "Index", "UUID"))]
    nvml.refuse = {name: NVMLError("Unknown Error") for name in asked}
    with GpuWatch(nvml, env={}, every_s=0.001) as watch:
        thread = watch._thread
        assert thread is not None
        thread.join(5)
        assert not thread.is_alive()
    assert nvml.calls.count("nvmlInit") == 2
    assert watch.summary()["not_available"] == "lost: Unknown Error"


def test_a_container_that_lost_its_devices_gets_them_back() -> None:
    """Catches telemetry that stays away for the rest of a run after `systemctl daemon-reload`."""
    nvml = FakeNvml()
    nvml.heals_on_init = True
    names = [name[1:] for name in dir(FakeNvml) if name.startswith("_nvmlDeviceGet")]
    asked = [name for name in names if not name.endswith(("Count", "Index", "UUID"))]
    nvml.refuse = {name: NVMLError("Unknown Error") for name in asked}
    found = watched(nvml)
    assert found["gpus"][UUIDS[0]]["name"] == "NVIDIA H200"
    assert "not_available" not in found["gpus"][UUIDS[0]]


def test_a_driver_that_hangs_does_not_hold_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that ends only when the driver answers."""
    monkeypatch.setattr(gpus, "LONGEST_CALL_S", 0.05)
    nvml, hang, asked = FakeNvml(), threading.Event(), threading.Event()

    def stuck(card: int) -> str:
        asked.set()
        hang.wait(10)
        return "name"

    nvml._nvmlDeviceGetName = stuck  # type: ignore[method-assign]
    with GpuWatch(nvml, env={}, every_s=0.001) as watch:
        assert asked.wait(5)
    assert watch.summary()["not_available"] == "the driver does not answer"
    hang.set()


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, UUIDS),
        ("", []),
        ("-1", []),
        ("1", [UUIDS[1]]),
        ("1,0", [UUIDS[1], UUIDS[0]]),
        ("GPU-bb", [UUIDS[1]]),
        ("GPU-", []),
        ("MIG-x/1/0", ["MIG-x/1/0"]),
        ("0,9,1", [UUIDS[0]]),
        ("0,0", [UUIDS[0]]),
        ("none", []),
    ],
)
def test_visible_devices_are_those_of_cuda(variable: str | None, seen: list[str]) -> None:
    """Catches telemetry of a card that another job uses."""
    assert wanted_devices(variable, UUIDS) == seen


def test_a_hidden_card_is_not_watched() -> None:
    """Catches CUDA_VISIBLE_DEVICES that is read but not obeyed."""
    nvml = FakeNvml()
    nvml.enough = 2
    assert list(watched(nvml, "1")["gpus"]) == [UUIDS[1]]
    assert watched(FakeNvml(), "-1", wait=False)["not_available"] == "no visible GPU"


def test_the_real_library_answers_or_gives_a_reason() -> None:
    """Catches a call that the real package does not have; there may be no driver here."""
    with GpuWatch() as watch:
        pass
    found = watch.summary()
    assert "gpus" in found or found["not_available"]
