"""Databases as the dashboard finds them."""

import shutil
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from playwright.sync_api import BrowserContext, Page
from playwright.sync_api import Error as PlaywrightError
from sqlalchemy import make_url
from tests.dashboard.browsing import (
    DESK,
    WAIT_MS,
    Browse,
    described,
    profile,
    require_chromium,
    watched,
)
from tests.dashboard.invented import Spec
from tests.dashboard.invented_actions import furnish
from tests.dashboard.invented_episodes import write_ended
from tests.dashboard.invented_kernels import fill_kernels
from tests.dashboard.invented_runs import fill_history, make_run, save, save_ended
from tests.dashboard.invented_service import begin_going, serve
from tests.dashboard.pages import AsPerson

from quantwatch.domain import RunResult, RunStatus
from quantwatch.store.session import Database, open_database
from quantwatch_dashboard import access
from quantwatch_dashboard.launch import serving
from quantwatch_dashboard.roles import How, Person, Role


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
    run = make_run(Spec())[0]
    # What is kept of a candidate is kept for as long as it lives: each test has its own.
    return replace(run, candidates=tuple(replace(each) for each in run.candidates))


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


@pytest.fixture
def as_person(monkeypatch: pytest.MonkeyPatch) -> AsPerson:
    """Let somebody with a role look at the pages from now on."""

    def come(role: Role, name: str = "ann", how: How = How.SIGNED_IN) -> Person:
        person = Person(name, role, how)
        monkeypatch.setattr(access, "current", lambda: person)
        return person

    return come


@dataclass(frozen=True)
class Site:
    """A dashboard that is served, its database, and the alert of it that fires."""

    address: str
    database: str
    alert: int


@pytest.fixture(scope="session")
def chromium() -> Iterator[BrowserContext]:
    """Headless Chromium, once for all tests; a skip, in CI a failure, without it."""
    require_chromium()
    with profile() as found:
        yield found


@pytest.fixture(scope="session")
def site(
    chromium: BrowserContext,
    filled: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    """The dashboard of a database with something on every page; tests may act on it."""
    own = shutil.copy(filled, tmp_path_factory.mktemp("site") / "quantwatch.db")
    url = f"sqlite:///{own}"
    alert = furnish(url)
    write_ended(url, alert)
    fill_kernels(url)
    serve(url)
    begin_going(url)
    with serving(url, WAIT_MS / 1000) as address:
        yield Site(address, url, alert)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say what the open pages were when a test failed: its own words are of one wait, in vain."""
    report = yield
    arguments: dict[str, Any] = getattr(item, "funcargs", {})
    if report.failed and call.when == "call" and "browse" in arguments:
        folder = arguments["tmp_path_factory"].mktemp("pages")
        for number, page in enumerate(arguments["chromium"].pages):
            try:
                words = described(page, folder / f"{number}.png")
            except PlaywrightError as error:  # the test's own failure must not be lost for this
                words = f"{page.url} can't be described: {error}"
            report.sections.append((f"page {number}", words))
    return report


@pytest.fixture
def browse(chromium: BrowserContext, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browse]:
    """Open pages without cookies, 1280 px wide and light until told otherwise."""
    chromium.clear_cookies()
    opened = []

    def browse(url: str) -> tuple[Page, list[str]]:
        page = chromium.new_page()
        opened.append(page)
        page.set_viewport_size(DESK)
        page.emulate_media(color_scheme="light")
        errors = watched(page)
        page.goto(url)
        return page, errors

    yield browse
    for page in opened:
        page.close()
