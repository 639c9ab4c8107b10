"""`executor = "ray"` on a real cluster of this machine's own: one actor is killed at its batch."""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from quantwatch.config.schema import CheckConfig
from quantwatch.errors import ConfigError
from quantwatch.pipeline import RunRequest
from quantwatch.pipeline.executors import ray_cluster, rays, sharding
from quantwatch.pipeline.executors.job import Event, Opened
from quantwatch.pipeline.measure import measure_check


class Quiet:
    def start(self, stage: str, total_tokens: int) -> None:
        pass

    def advance(self, tokens: int) -> None:
        pass


_INT8 = {"name": "int8", "model": "tiny", "recipe": "int8-channel"}


def _request(folder: Path, **settings: Any) -> RunRequest:
    check = CheckConfig.model_validate(
        {
            "reference": {"model": "tiny"},
            "candidates": [_INT8],
            "suite": {"files": ["prompts.json"]},
            "isolated_fraction": 0.3,
            "batch_tokens": 40,
            "threads": 1,
            **settings,
        }
    )
    return RunRequest("spread", check, folder, folder / "cache")


class _Killing(rays.RayCrew):
    """Stops an actor, gives it unit 2, and kills it; notes who listens, and where."""

    places: dict[int, int]
    victims: list[int]
    heard_at: set[str]

    def wait(self, timeout_s: float) -> Event | None:
        event = super().wait(timeout_s)
        if isinstance(event, Opened):
            vars(self).setdefault("places", {})[event.worker] = int(event.place.rpartition(":")[2])
        return event

    def give(self, worker: int, unit: int) -> None:
        if unit != 2 or type(self).victims:
            super().give(worker, unit)
            return
        pid = self.places[worker]
        type(self).victims.append(pid)
        type(self).heard_at |= {
            each.laddr.ip
            for process in psutil.Process().children(recursive=True)
            for each in process.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        }
        os.kill(pid, signal.SIGSTOP)
        super().give(worker, unit)
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_actor_changes_no_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a batch that Ray sends twice or drops, and a cluster that others can reach."""
    monkeypatch.setattr(sharding, "cores", lambda: 2)
    monkeypatch.setattr(rays, "RayCrew", _Killing)
    monkeypatch.setattr(_Killing, "victims", [], raising=False)
    monkeypatch.setattr(_Killing, "heard_at", set(), raising=False)
    smaller = {"batch_tokens": 12}  # enough batches that a replacement is worth its start
    with measure_check(_request(folder, **smaller), Quiet()) as measured:
        blocks, floor, report = list(measured.blocks()), dict(measured.floor), measured.report
    wanted = _request(folder, executor="ray", shards=2, **smaller)
    with measure_check(wanted, Quiet()) as measured:
        found = list(measured.blocks())
        told = measured.report
        assert dict(measured.floor) == floor
    assert len(found) == len(blocks) > 20
    for one, other in zip(found, blocks, strict=True):
        assert (one.kind, one.metric, one.prompt) == (other.kind, other.metric, other.prompt)
        np.testing.assert_array_equal(one.values, other.values, err_msg=one.metric)
    assert (told.num_forwards, told.firings) == (report.num_forwards, report.firings)
    assert (told.sharding["executor"], told.sharding["shards"]) == ("ray", 2)
    assert (told.sharding["retried"], told.sharding["replaced"]) == (1, 1)
    assert len(told.sharding["lost"]) == len(_Killing.victims) == 1
    assert "worker" in told.sharding["lost"][0]
    assert capsys.readouterr().out == ""
    assert _Killing.heard_at
    assert _Killing.heard_at <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert not psutil.pid_exists(_Killing.victims[0])


def test_without_ray_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError in the middle of a night."""
    monkeypatch.setitem(sys.modules, "ray", None)
    missing = _request(folder, executor="ray", reference={"model": "nowhere"})
    with (
        pytest.raises(ConfigError, match=r'pip install "quantwatch\[ray\]"'),
        measure_check(missing, Quiet()),
    ):
        pass


def _refused(folder: Path, words: str, **settings: Any) -> None:
    """The reference does not exist: a model that is looked for first ends in another error."""
    nowhere = _request(folder, executor="ray", reference={"model": "nowhere"}, **settings)
    with pytest.raises(ConfigError, match=words), measure_check(nowhere, Quiet()):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "[::1]:{}"])
def test_an_address_where_nobody_listens_is_refused_at_once(folder: Path, address: str) -> None:
    """Catches a run that waits for a cluster that isn't there: Ray itself does, for very long."""
    with socket.socket() as bound:  # and doesn't listen
        bound.bind(("127.0.0.1", 0))
        wanted = address.format(bound.getsockname()[1])
        _refused(folder, "nobody listens", ray_address=wanted)


def _none(place: Path, port: int) -> str:
    return "Could not find any running Ray instance"


def _variable(place: Path, port: int) -> str:
    os.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"
    return f"'auto': nobody listens at 127.0.0.1:{port}"


def _left_behind(place: Path, port: int) -> str:
    """A cluster that was killed with its machine leaves its address where Ray looks for one."""
    (place / "ray").mkdir()
    (place / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{port}")
    return f"'auto': nobody listens at 127.0.0.1:{port}"


@pytest.mark.parametrize("state", [_none, _variable, _left_behind])
def test_auto_without_a_cluster_is_refused_before_models_are_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: Any
) -> None:
    """Catches a night that loads its models and hears only then that there is no cluster."""
    from ray._private import services

    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        words = state(tmp_path, bound.getsockname()[1])
        _refused(folder, words, ray_address="auto")


@pytest.mark.parametrize("address", ["a cluster", "127.0.0.1", "127.0.0.1:port", "gopher://a:1"])
def test_what_is_no_address_is_refused_before_models_are_loaded(folder: Path, address: str) -> None:
    _refused(
        folder,
        "ray_address .*: (no cluster can be joined|nobody listens) there",
        ray_address=address,
    )


def test_an_address_where_somebody_listens_is_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        ray_cluster.require_listener(address, address)


class _Cluster:
    """As much of Ray as is needed to be refused."""

    def __init__(self, **resources: float) -> None:
        self._resources = resources
        self.joined: list[str | None] = []

    def is_initialized(self) -> bool:
        return bool(self.joined and self.joined[-1])

    def init(self, address: str, **_: Any) -> None:
        self.joined.append(address)

    def shutdown(self) -> None:
        self.joined.append(None)

    def cluster_resources(self) -> dict[str, float]:
        return self._resources


@pytest.mark.parametrize(
    ("resources", "device", "words"),
    [
        ({"CPU": 3.0}, "cpu", "room for 1 workers of 2 CPUs each"),
        ({"CPU": 8.0, "GPU": 1.0}, "cuda", "room for 1 workers of 2 CPUs and 1 GPU each"),
    ],
)
def test_a_cluster_without_room_says_so(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    resources: dict[str, float],
    device: str,
    words: str,
) -> None:
    """Catches actors that are never placed: the run would wait for them until its deadline."""
    cluster = _Cluster(**resources)
    for module in (ray_cluster, rays):
        monkeypatch.setattr(module, "require_ray", lambda _: cluster)
    settings: dict[str, Any] = {"threads": 2, "shards": 2, "ray_address": "ray://127.0.0.1"}
    _refused(folder, words, candidates=[{**_INT8, "device": device}], **settings)
    assert cluster.joined == ["ray://127.0.0.1", None]
    request = _request(folder, executor="ray", reference={"model": "tiny", "device": device})
    job: Any = type("Job", (), {"request": request})()
    with pytest.raises(ConfigError, match=words):
        rays.RayCrew(job, sharding.Sharding("ray", 2, 2, "auto"), 9)
    assert cluster.joined[2:] == ["auto", None]
