"""`executor = "local"`: several processes store the rows of one, whatever becomes of them."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch
from sqlalchemy import text

import quantwatch
from quantwatch.config.schema import CheckConfig
from quantwatch.errors import ConfigError, ModelError, WorkersLostError
from quantwatch.pipeline import RunRequest, estimate, loading, run_check
from quantwatch.pipeline.executors import driver, sharding, spreading
from quantwatch.pipeline.executors.job import portable
from quantwatch.pipeline.executors.local import LocalCrew
from quantwatch.pipeline.measure import measure_check
from quantwatch.pipeline.reasons import explain
from quantwatch.store.runs import get_result
from quantwatch.store.session import Database
from quantwatch_dashboard.components.facts import identity

FAULT = {"scope": "layers.1.mlp.down_proj", "scale": 1.2}
GPTQ = {
    "weights": "int4", "granularity": "group", "group_size": 16, "method": "gptq",
    "calibration": {"suite": {"files": ["prompts.json"]}, "limit": 8},
}  # fmt: skip


class Quiet:
    def start(self, stage: str, total_tokens: int) -> None:
        pass

    def advance(self, tokens: int) -> None:
        pass


class Counting(Quiet):
    def __init__(self) -> None:
        self.total = self.done = 0

    def start(self, stage: str, total_tokens: int) -> None:
        self.total += total_tokens

    def advance(self, tokens: int) -> None:
        self.done += tokens


def _request(folder: Path, *candidates: dict[str, Any], **settings: Any) -> RunRequest:
    given = {
        "reference": {"model": "tiny"},
        "candidates": candidates
        or [
            {"name": "int8", "model": "tiny", "recipe": "int8-channel"},
            {"name": "faulty", "model": "tiny", "faults": [FAULT]},
            {"name": "gptq", "model": "tiny", "recipe": GPTQ},
        ],
        "suite": {"files": ["prompts.json"]},
        "isolated_fraction": 0.3,
        "batch_tokens": 40,
        "threads": 1,
        **settings,
    }
    return RunRequest("spread", CheckConfig.model_validate(given), folder, folder / "cache")


MADE = """
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer

def build():
    folder = Path(__file__).with_name("tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[0].self_attn.o_proj.weight.data *= 1.1
    return model, AutoTokenizer.from_pretrained(folder)
"""
"""A factory; it lies beside the configuration."""


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes, however few cores the machine has."""
    monkeypatch.setattr(sharding, "cores", lambda: 4)


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    """Whatever a test does, no worker outlives its run."""
    yield
    left = [p for p in psutil.Process().children(recursive=True) if _is_worker(p)]
    assert not left


def _is_worker(process: psutil.Process) -> bool:
    try:
        return any("executors.child" in part for part in process.cmdline())
    except psutil.Error:
        return False


_PASSING = {"id", "run_id", "run_candidate_id", "alert_id", "created_at"}


def _rows(database: Database, run_id: str) -> dict[str, list[dict[str, Any]]]:
    """Return everything that was stored of a run's measurements, without the names of rows."""
    with database.reader() as session:
        found: dict[str, list[dict[str, Any]]] = {}
        for name in ("measurement", "block", "detectable"):
            found[name] = _plain(
                session,
                f"SELECT c.name AS candidate_name, t.* FROM {name} t JOIN run_candidate c "
                "ON t.run_candidate_id = c.id WHERE c.run_id = :run ORDER BY 1, 2, 3, 4, 5",
                run_id,
            )
        for name in ("noise_floor", "alert_scope"):
            found[name] = _plain(session, f"SELECT * FROM {name} WHERE run_id = :run", run_id)
        return found


def _plain(session: Any, sql: str, run_id: str) -> list[dict[str, Any]]:
    rows = [dict(row) for row in session.execute(text(sql), {"run": run_id}).mappings()]
    plain = [{k: v for k, v in row.items() if k not in _PASSING} for row in rows]
    return sorted(plain, key=repr)


def _stored(database: Database, request: RunRequest) -> tuple[Any, dict[str, Any]]:
    run = run_check(request, database=database, progress=Quiet())
    return get_result(database, run.run_id), _rows(database, run.run_id)


@pytest.mark.slow
def test_one_two_and_four_processes_store_the_rows_of_none(
    folder: Path, database: Database
) -> None:
    """Catches any stored bit that depends on who measured it, and rows in another order."""
    (folder / "made_for_workers.py").write_text(MADE)
    int8, faulty, gptq = _request(folder).check.candidates
    factory = {"name": "made", "factory": "made_for_workers:build", "allow_code": True}
    gone = {"name": "gone", "model": "nowhere"}
    every = [*(c.model_dump() for c in (int8, faulty, gptq)), factory, gone]
    inline, rows = _stored(database, _request(folder, *every))
    assert [c.failure is None for c in inline.candidates] == [True] * 4 + [False]
    assert len(rows["measurement"]) > 100
    assert len(rows["block"]) > 100
    assert rows["noise_floor"]
    assert inline.capture["sharding"] == {}
    for shards in (1, 2, 4):
        run, found = _stored(database, _request(folder, *every, executor="local", shards=shards))
        for table, theirs in rows.items():
            assert found[table] == theirs, (shards, table)
        assert run.candidates == inline.candidates
        assert run.noise_floor == inline.noise_floor
        assert run.capture_sha == inline.capture_sha
        assert run.baseline_mismatch == inline.baseline_mismatch
        told = run.capture["sharding"]
        assert (told["executor"], told["shards"], told["threads"]) == ("local", shards, 1)
        assert (told["retried"], told["lost"]) == (0, [])
        assert len(told["peak_memory_bytes"]) >= 1
        assert "of 1 thread (local)" in identity(run)
        for name in run.capture.keys() - {"sharding", "timings_s"}:
            assert run.capture[name] == inline.capture[name], name


def _measured(request: RunRequest, progress: Any = None) -> tuple[Any, ...]:
    with measure_check(request, progress or Quiet()) as measured:
        return list(measured.blocks()), dict(measured.floor), measured.report


def _assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) > 20
    for one, other in zip(ours, theirs, strict=True):
        assert (one.kind, one.metric, one.prompt) == (other.kind, other.metric, other.prompt)
        np.testing.assert_array_equal(one.values, other.values, err_msg=one.metric)


ONE = {"name": "int8", "model": "tiny", "recipe": "int8-channel"}


class _Killing(LocalCrew):
    """Stops a worker, gives it a unit, and kills it: it is at that unit for certain."""

    victims: ClassVar[dict[int, int]] = {}
    """Unit → how many workers still die of it."""

    def give(self, worker: int, unit: int) -> None:
        if self.victims.get(unit, 0):
            self.victims[unit] -= 1
            pid = self.workers[worker].process.pid
            os.kill(pid, signal.SIGSTOP)
            super().give(worker, unit)
            os.kill(pid, signal.SIGKILL)
        else:
            super().give(worker, unit)


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> type[_Killing]:
    monkeypatch.setattr(spreading, "LocalCrew", _Killing)
    monkeypatch.setattr(_Killing, "victims", {})
    return _Killing


@pytest.mark.slow
def test_a_killed_worker_changes_no_bit(folder: Path, killing: type[_Killing]) -> None:
    """Catches a batch that is lost, or counted twice, with the process that had it."""
    settings = {"memory": "streamed", "prefill_chunk": 7, "lens": "estimated"}
    blocks, floor, report = _measured(_request(folder, ONE, **settings))
    killing.victims = {3: 1}
    steps = Counting()
    ours, our_floor, told = _measured(
        _request(folder, ONE, executor="local", shards=2, **settings), steps
    )
    _assert_same(ours, blocks)
    assert our_floor == floor
    assert told.num_forwards == report.num_forwards
    assert told.firings == report.firings
    assert steps.done == steps.total
    assert told.sharding["retried"] == 1
    (lost,) = told.sharding["lost"]
    assert "was killed by SIGKILL" in lost
    assert told.sharding["shards"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_killed_workers_are_replaced_and_change_no_bit(
    folder: Path, killing: type[_Killing], shards: int
) -> None:
    """Catches a night that goes on with fewer processes, or ends with the last."""
    blocks, floor, report = _measured(_request(folder, ONE, batch_tokens=12))
    killing.victims = dict.fromkeys((1, 9)[:shards], 1)
    steps = Counting()
    wanted = _request(folder, ONE, executor="local", shards=shards, batch_tokens=12)
    ours, our_floor, told = _measured(wanted, steps)
    _assert_same(ours, blocks)
    assert our_floor == floor
    assert (told.num_forwards, told.firings) == (report.num_forwards, report.firings)
    assert steps.done == steps.total
    told = told.sharding
    assert (told["shards"], told["retried"], len(told["lost"])) == (shards, shards, shards)
    assert told["replaced"] >= 1


@pytest.mark.slow
def test_a_batch_that_kills_everybody_ends_the_run_by_name(
    folder: Path, killing: type[_Killing]
) -> None:
    """Catches a run that hangs, or goes on without a batch."""
    killing.victims = {3: 9}
    wanted = _request(folder, ONE, executor="local", shards=4)
    with pytest.raises(
        WorkersLostError, match=r"batch 3 \(prompt.* can't be measured: 3 work"
    ) as e:
        _measured(wanted)
    failure = explain(e.value)
    assert (failure.code, failure.retryable) == ("killed", True)


@pytest.mark.slow
def test_without_any_worker_the_run_ends(folder: Path, killing: type[_Killing]) -> None:
    """Catches a wait for somebody who never comes."""
    killing.victims = {2: 2}
    with pytest.raises(WorkersLostError, match=r"no worker is left, .*batch 2 .*: all 2 are gone"):
        _measured(_request(folder, ONE, executor="local", shards=1))


@pytest.mark.slow
def test_what_a_worker_raises_is_raised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error of a worker that looks like its death, and other numbers that look alike."""
    facts = driver.first_difference
    monkeypatch.setattr(
        driver, "first_difference", lambda one, other: facts(one, {**other, "x": 1})
    )
    with pytest.raises(ModelError, match=r"worker 0 .* would not measure the same numbers: x is 1"):
        _measured(_request(folder, ONE, executor="local", shards=1))


@pytest.mark.slow
def test_a_stop_ends_the_workers_at_once(folder: Path) -> None:
    """Catches a cancelled run whose processes compute on. The fixture counts who is left."""

    class Stopping(Quiet):
        def advance(self, tokens: int) -> None:
            if tokens:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _measured(_request(folder, ONE, executor="local", shards=1), Stopping())


ABANDONED = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from tests.monitor.pipeline.test_executors import ONE, Quiet, _measured, _request

    class Dying(Quiet):
        def advance(self, tokens):
            if tokens:
                print("measuring", flush=True)
                time.sleep(600)

    _measured(_request(Path(sys.argv[1]), ONE, executor="local", shards=1), Dying())
    """
)


@pytest.mark.slow
def test_workers_end_with_a_run_that_is_killed(folder: Path) -> None:
    """Catches processes that hold two models in memory and wait for nobody."""
    command = [sys.executable, "-c", ABANDONED, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline().strip() == "measuring"
        workers = [p for p in psutil.Process(run.pid).children() if _is_worker(p)]
        assert len(workers) == 1
        run.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shards": 2}, 'shards = 2 is for executor = "local" or "ray", not "inline"'),
        ({"executor": "local", "ray_address": "auto"}, 'ray_address is for executor = "ray"'),
        ({"executor": "local", "reference_cache": True}, "reference_cache = true exclude each"),
        ({"executor": "threads"}, "executor"),
        ({"executor": "ray", "ray_address": "local"}, 'ray_address = "local" is not allowed'),
        ({"executor": "local", "shards": 0}, "shards"),
    ],
)
def test_what_cannot_be_spread_is_no_configuration(
    folder: Path, settings: dict[str, Any], words: str
) -> None:
    """Catches a setting that is ignored without a word."""
    with pytest.raises(ValueError, match=words):
        _request(folder, ONE, **settings)


def test_a_served_candidate_is_asked_by_one_process(folder: Path) -> None:
    served = {"name": "there", "served": {"url": "http://127.0.0.1:9", "api": "vllm"}}
    with pytest.raises(ValueError, match="can't ask a server: there is asked by one process"):
        _request(folder, served, executor="local")


def test_ray_chooses_the_gpu(folder: Path) -> None:
    other = {**ONE, "device": "cuda:1"}
    with pytest.raises(ValueError, match='device = "cuda:1" is not allowed; allowed: "cpu" and'):
        _request(folder, other, executor="ray")
    assert _request(folder, {**ONE, "device": "cuda"}, executor="ray").check.shards is None


def test_more_threads_than_cores_are_refused_before_anything_is_loaded(folder: Path) -> None:
    """Catches processes that wait for one another at every operation."""
    missing = {"name": "c", "model": "nowhere"}
    wanted = _request(folder, missing, executor="local", shards=3, threads=2)
    with pytest.raises(
        ConfigError, match=r"shards = 3 with threads = 2 .* on 6 threads, .* 4 cores"
    ):
        _measured(wanted)


def test_shards_follow_from_cores_and_threads(folder: Path) -> None:
    def of(**settings: Any) -> sharding.Sharding:
        found = sharding.sharding_of(_request(folder, ONE, executor="local", **settings).check)
        assert found is not None
        return found

    assert [of(threads=n).num_shards for n in (1, 2, 3, 4, 8)] == [4, 2, 1, 1, 1]
    assert of(threads=2, shards=2).num_shards == 2
    assert sharding.sharding_of(_request(folder, ONE).check) is None


def test_loading_keeps_to_the_threads_of_measuring(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches values that were calibrated on other threads in a worker than in the run's process."""
    seen = list[int]()
    monkeypatch.setattr(
        loading, "load_variant", lambda *_, **__: seen.append(torch.get_num_threads())
    )
    wanted = _request(folder, ONE, threads=3)
    loading.load_one(wanted, "reference", wanted.check.reference)
    assert (seen, torch.get_num_threads()) == ([3], 1)


class _OddError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_errors_that_cannot_be_sent_are_told_in_words() -> None:
    """Catches a worker whose error dies on its way, and looks like the worker's death."""
    sent = portable(ModelError("no such file"))
    assert (type(sent), str(sent)) == (ModelError, "no such file")
    odd = portable(_OddError(1, 2))
    assert (type(odd), str(odd)) == (RuntimeError, "_OddError: 1 and 2")


def test_an_estimate_counts_every_process(folder: Path) -> None:
    """Catches a run that is begun in memory for one process and needs that of three."""
    alone = estimate(_request(folder, ONE)).memory_bytes
    spread = estimate(_request(folder, ONE, executor="local", shards=2)).memory_bytes
    away = estimate(_request(folder, ONE, executor="ray", ray_address="auto")).memory_bytes
    working = 400 << 20
    assert alone is not None
    assert spread == 3 * (alone - working) + 2 * working
    assert away == alone


def test_all_cores_for_one_process_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an executor that spreads nothing and doesn't say why."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    found = sharding.sharding_of(_request(folder, ONE, executor="local", threads=None).check)
    assert found is not None
    assert found.num_shards == 1
    assert found.notes == ("one process of 4 threads fills 4 cores; threads = 1 allows more",)


def test_modules_in_memory_are_nowhere_else() -> None:
    with pytest.raises(ConfigError, match="executor = 'local' is no setting: the modules are in"):
        quantwatch.compare(None, None, [[1, 2]], executor="local")  # type: ignore[arg-type]
