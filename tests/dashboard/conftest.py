"""Databases as the dashboard finds them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import streamlit as st
from sqlalchemy import make_url
from tests.dashboard.invented import Spec
from tests.dashboard.invented_actions import furnish
from tests.dashboard.invented_runs import fill_history, make_run, save, save_ended

from quantwatch.domain import RunResult, RunStatus
from quantwatch.store.session import Database, open_database


@pytest.fixture
def empty_url(
    migrated_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """An empty database at the current schema, named in the environment as the CLI does it."""
    url = f"sqlite:///{shutil.copy(migrated_file, tmp_path / 'quantwatch.db')}"
    monkeypatch.setenv("QUANTWATCH_DATABASE_URL", url)
    yield url
    st.cache_resource.clear()


@pytest.fixture
def save_run(empty_url: str, tmp_path: Path) -> Callable[[Spec], RunResult]:
    """Write runs into the database that the dashboard reads."""
    return lambda spec: save(empty_url, spec, tmp_path)


@pytest.fixture
def planted(tmp_path: Path) -> RunResult:
    """The demo's run: four candidates, one with a planted fault."""
    return make_run(Spec(), tmp_path)[0]


@pytest.fixture
def end_run(empty_url: str) -> Callable[[Spec, RunStatus, str], None]:
    """Write a run that failed or was cancelled into the database that the dashboard reads."""
    return lambda spec, status, reason: save_ended(empty_url, spec, status, reason)


@pytest.fixture(scope="session")
def filled(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A week of nights of two checks, the last one with a fault, and a failed run."""
    folder = tmp_path_factory.mktemp("filled")
    path = Path(shutil.copy(migrated_file, folder / "quantwatch.db"))
    fill_history(f"sqlite:///{path}", folder)
    return path


@pytest.fixture
def demo_url(filled: Path, empty_url: str) -> str:
    """A copy of the filled database, named in the environment."""
    shutil.copy(filled, make_url(empty_url).database or "")
    return empty_url


@pytest.fixture
def furnished(demo_url: str) -> str:
    """The filled database with something to act on, named in the environment."""
    furnish(demo_url)
    return demo_url


@pytest.fixture
def db(furnished: str) -> Iterator[Database]:
    """The same, for looking at what became of it."""
    database = open_database(furnished, read_only=True)
    yield database
    database.close()
