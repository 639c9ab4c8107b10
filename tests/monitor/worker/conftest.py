"""A migrated database of each kind, and runs that wait for a worker."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from quantwatch.config.load import parse
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import RunEvent, RunStatus
from quantwatch.store import leases
from quantwatch.store.attempts import WorkerId
from quantwatch.store.leases import Claim
from quantwatch.store.queue import NewRun, enqueue
from quantwatch.store.session import Database
from quantwatch.store.tables import DeviceSlotRow, RunAttemptRow, RunCandidateRow, RunRow
from quantwatch.telemetry import new_run_id


def _load(name: str, path: Path) -> ModuleType:
    """Load fixtures of other tests: tests are no package, so there is no import for it."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_store: Any = _load("store_fixtures", Path(__file__).parents[1] / "store" / "conftest.py")
suite, make_result, token_blocks = _store.suite, _store.make_result, _store.token_blocks

HOST = "alpha"
Queue = Callable[..., str]
Take = Callable[..., Claim]
Peek = Callable[..., Any]


def worker(name: str = "w1", host: str = HOST) -> WorkerId:
    return WorkerId(name, host, 1234)


@pytest.fixture
def queue(db: Database) -> Queue:
    """Queue a run of a check and return its id; other names replace fields."""

    def queue_one(check: str = "nightly", **fields: Any) -> str:
        given: dict[str, Any] = {
            "slot_key": f"m:{new_run_id()}",
            "config": {},
            "base_dir": "/",
            **fields,
        }
        with db.writer() as session:
            run_id = enqueue(session, NewRun(check=check, **given))
        assert run_id is not None
        return run_id

    return queue_one


@pytest.fixture
def take(db: Database) -> Take:
    """Claim the next run, which there must be; `to` leads it further."""

    def take_one(
        name: str = "w1", *, devices: tuple[str, ...] = ("cpu",), to: str = "", **known: Any
    ) -> Claim:
        with db.writer() as session:
            claim = leases.claim(session, worker(name), devices, **known)
        assert claim is not None
        steps = {"preparing": 1, "measuring": 2, "finalizing": 3}.get(to, 0)
        for event in (RunEvent.PREPARE, RunEvent.MEASURE, RunEvent.FINALIZE)[:steps]:
            leases.advance(db, claim, event)
        return claim

    return take_one


@pytest.fixture(scope="session")
def tiny_check(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CheckConfig]:
    """A folder with a tiny real model and prompts, and a check that finds a planted fault in it."""
    folder = tmp_path_factory.mktemp("tiny-check")
    build_tiny(folder)
    fault = {"scope": "layers.2.mlp.down_proj", "scale": 1.05}
    check = {
        "reference": {"model": "./tiny"},
        "candidates": [{"name": "faulty", "model": "./tiny", "faults": [fault]}],
        "suite": {"files": ["prompts.json"]},
        "threads": 1,
    }
    return folder, parse(CheckConfig, check, "test")


def build_tiny(folder: Path) -> None:
    from tests.monitor.tiny_models import save_word_model

    words = [f"w{i}" for i in range(96)]
    save_word_model(folder / "tiny", len(words), num_hidden_layers=4)
    texts = [" ".join(words[i * 7 : i * 7 + 5 + 3 * i]) for i in range(6)]
    (folder / "prompts.json").write_text(json.dumps(texts))


@pytest.fixture
def peek(db: Database) -> Peek:
    """Read columns of a run's row."""

    def look(run_id: str, *names: str) -> Any:
        columns = [getattr(RunRow, name) for name in names]
        with db.reader() as session:
            row = session.execute(select(*columns).where(RunRow.id == run_id)).one()
        return row[0] if len(names) == 1 else tuple(row)

    return look


@pytest.fixture
def invariants(db: Database) -> Callable[[], None]:
    """What holds at any time, whatever was killed (service_anchors §7.4)."""

    def check() -> None:
        active = [status.value for status in RunStatus if status.is_active]
        with db.reader() as session:
            assert not _strays(session, RunCandidateRow.run_id, [RunStatus.SUCCEEDED.value]), (
                "results"
            )
            assert not _strays(session, DeviceSlotRow.run_id, active), "slots"
            lasting = RunAttemptRow.outcome.is_(None)
            assert not _strays(session, RunAttemptRow.run_id, active, lasting), "attempts"
            twice = select(RunRow.check_id).group_by(RunRow.check_id, RunRow.slot_key)
            assert not session.execute(twice.having(func.count() > 1)).all()
            if session.get_bind().dialect.name == "sqlite":
                assert not session.execute(text("PRAGMA foreign_key_check")).all()

    return check


def _strays(session: Session, column: Any, states: list[str], *where: Any) -> list[Any]:
    """Rows of runs that are in none of these states."""
    query = select(column).join(RunRow, RunRow.id == column)
    return list(session.scalars(query.where(RunRow.status.not_in(states), *where)))
