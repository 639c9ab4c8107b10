"""Locks, mounts, containers, signals: what a service finds around it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quantwatch.cli import preflight
from quantwatch.cli.probes import Finding
from quantwatch.errors import StoreError
from quantwatch.service import cgroup
from quantwatch.service.lock import only_scheduler
from quantwatch.service.mounts import mount_of
from quantwatch.service.stopping import stop_on_signals
from quantwatch.store.disk import Space
from quantwatch.store.session import Database

ROOT = Path(__file__).parents[3]
MOUNTS = r"""
/dev/sda1 / ext4 rw,relatime 0 0
server:/export /mnt/share nfs4 rw,vers=4.2 0 0
//nas/data /mnt/with\040blank cifs rw 0 0
overlay /var/lib/app overlay ro,relatime 0 0
tmpfs /mnt/share/local tmpfs rw 0 0
"""


def test_a_second_scheduler_on_one_file_is_refused(db: Database) -> None:
    """Catches two schedulers on one SQLite file (B01); PostgreSQL may have any number."""
    with only_scheduler(db):
        if db.engine.dialect.name == "postgresql":
            with only_scheduler(db):
                return
        with (
            pytest.raises(StoreError, match=rf"process {os.getpid()}.*--standby"),
            only_scheduler(db),
        ):
            pass
    with only_scheduler(db):
        pass


@pytest.mark.slow
def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    """Catches a lock file that has to be removed by hand after a crash."""
    code = f"""
import os, signal
from quantwatch.store.upgrade import upgrade
from quantwatch.store.session import open_database
from quantwatch.service.lock import only_scheduler
upgrade("sqlite:///{tmp_path}/x.db")
with only_scheduler(open_database("sqlite:///{tmp_path}/x.db")):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    from quantwatch.store.session import open_database

    with only_scheduler(open_database(f"sqlite:///{tmp_path}/x.db")):
        pass


@pytest.mark.parametrize(
    ("path", "kind", "network", "read_only"),
    [
        ("/srv/x.db", "ext4", False, False),
        ("/mnt/share/x.db", "nfs4", True, False),
        ("/mnt/share", "nfs4", True, False),
        ("/mnt/shared/x.db", "ext4", False, False),
        ("/mnt/share/local/x.db", "tmpfs", False, False),
        ("/mnt/with blank/x.db", "cifs", True, False),
        ("/var/lib/app/x", "overlay", False, True),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str, network: bool, read_only: bool) -> None:
    """Catches SQLite on NFS, and a folder that is taken for one because its name begins alike."""
    mount = mount_of(Path(path), MOUNTS)
    assert mount is not None
    assert (mount.kind, mount.is_network, mount.is_read_only) == (kind, network, read_only)


def test_a_system_without_a_table_of_mounts() -> None:
    """Catches a start that fails where /proc is missing."""
    assert mount_of(Path("/srv"), "") is None


def test_limits_of_a_container(tmp_path: Path) -> None:
    """Catches a quota of version 1 or 2 that is not seen, and "no limit" taken for a number."""
    assert cgroup.limits(tmp_path) == cgroup.Limits(None, None, None)
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "pids.max").write_text("max\n")
    assert cgroup.limits(tmp_path) == cgroup.Limits(1 << 30, 1.5, None)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cgroup.limits(tmp_path).cpus is None


def test_limits_of_an_old_container(tmp_path: Path) -> None:
    """Catches version 1, whose files lie elsewhere and say "no limit" by a huge number."""
    for folder, name, text in [
        ("memory", "memory.limit_in_bytes", "9223372036854771712"),
        ("cpu", "cpu.cfs_quota_us", "200000"),
        ("cpu", "cpu.cfs_period_us", "100000"),
        ("pids", "pids.max", "100"),
    ]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    assert cgroup.limits(tmp_path) == cgroup.Limits(None, 2.0, 100)


NOTHING = cgroup.Limits(None, None, None)
FINDINGS = [
    (preflight.disk("x", Path("/x"), Space(50, 100)), "ok"),
    (preflight.disk("x", Path("/x"), Space(5, 100)), "warn"),
    (preflight.disk("x", Path("/x"), Space(2, 100)), "broken"),
    (preflight.files(256), "warn"),
    (preflight.files(4096), "ok"),
    (preflight.files(-1), "ok"),
    (preflight.memory(NOTHING), "ok"),
    (preflight.memory(cgroup.Limits(10**9, None, None)), "warn"),
    (preflight.processes(cgroup.Limits(None, None, 100)), "warn"),
    (preflight.processes(cgroup.Limits(None, None, 4096)), "ok"),
    (preflight.processors(cgroup.Limits(None, 2.0, None), 8), "warn"),
    (preflight.processors(cgroup.Limits(None, 2.0, None), 2), "ok"),
    (preflight.clock_finding(0.3), "ok"),
    (preflight.clock_finding(-5), "warn"),
    (preflight.clock_finding(7200), "broken"),
    (preflight._mount("database", Path("/mnt/share"), MOUNTS), "broken"),
    (preflight._mount("temporary files", Path("/tmp"), MOUNTS), "ok"),
]


@pytest.mark.parametrize(
    ("finding", "state"), FINDINGS, ids=[f"{f.name}-{f.text}" for f, _ in FINDINGS]
)
def test_what_deployments_forget(finding: Finding, state: str) -> None:
    """Catches a limit that is judged wrongly, and trouble without its fix."""
    assert finding.state == state
    assert bool(finding.fix) == (state != "ok")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_asks_to_stop_and_leaves_no_trace(number: signal.Signals) -> None:
    """Catches a handler that stays, and a second signal that tears the shutdown."""
    outside = signal.signal(number, signal.default_int_handler)  # under nohup it is ignored
    try:
        with stop_on_signals() as stopping:
            assert not stopping.is_set()
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert stopping.wait(5)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, outside)


SOURCES = [
    path
    for folder in ("monitor", "kernels", "dashboard", "migrations", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
]
UNSAFE = {
    "pickle": r"^\s*(import|from)\s+(c?[pP]ickle|dill|cloudpickle|joblib|shelve|marshal)\b",
    "numpy": r"allow_pickle\s*=\s*True",
    "torch": r"torch\.load\((?![^)]*weights_only\s*=\s*True)",
    "yaml": r"yaml\.(unsafe_)?load\(",
    "pandas": r"read_pickle|to_pickle",
}
FRAMES = ROOT / "monitor/quantwatch/pipeline/executors/frames.py"
"""What a run and its workers send each other: an unpickler that builds our own values alone."""


@pytest.mark.parametrize("what", UNSAFE)
def test_nothing_is_ever_unpickled(what: str) -> None:
    """Catches code that runs because somebody could write to the database or a file (B07)."""
    pattern = re.compile(UNSAFE[what], re.MULTILINE)
    searched = [path for path in SOURCES if what != "pickle" or path != FRAMES]
    found = [str(path.relative_to(ROOT)) for path in searched if pattern.search(path.read_text())]
    assert len(SOURCES) > 150
    assert found == []


def test_the_patterns_find_what_they_are_for() -> None:
    """Catches a search that can't find anything."""
    bad = {
        "pickle": "import pickle\n",
        "numpy": "np.load(f, allow_pickle=True)",
        "torch": "torch.load(path)",
        "yaml": "yaml.load(text)",
        "pandas": "pd.read_pickle(f)",
    }
    for what, text in bad.items():
        assert re.search(UNSAFE[what], text, re.MULTILINE), what
    assert not re.search(UNSAFE["torch"], "torch.load(path, weights_only=True)")
