"""`db prune`, `db sizes`, `db backup`, `db restore` as they are called."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from quantwatch.cli import main
from quantwatch.cli.retention import forecast, words
from quantwatch.store.runs import begin_run
from quantwatch.store.session import Database
from quantwatch.store.sizes import Flow, Sizes

Stored = Any
Quantwatch = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

CONFIG = """
schema_version = 1
[retention]
token_runs = 2
prompts = "10d"
flagged = "20d"
statistics = "30d"
runs = "360d"
logs = "60d"
"""


@pytest.fixture
def quantwatch(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Quantwatch:
    """Call the command line on the database, in a folder with a configuration."""
    (tmp_path / "quantwatch.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, database: str = db.url) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["--database", database, *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def test_prune_says_what_it_then_does(quantwatch: Quantwatch, stored: Stored) -> None:
    """Catches limits that are not the configuration's, and a dry run that deletes."""
    runs = stored.nightly(range(0, 20, 4))
    planned = json.loads(quantwatch("db", "prune", "--dry-run", "--json")[1])
    assert stored.tiers(runs[4]) == "TPLR"
    assert planned["deleted"] == {"token matrices": 18, "prompt sums": 2}
    code, out, _ = quantwatch("db", "prune")
    assert (code, stored.tiers(runs[4])) == (0, "LR")
    assert "token matrices" in out
    assert f"20 rows, {words(planned['payload_bytes'])} of matrices; the disk got" in out
    assert quantwatch("db", "prune", "--dry-run")[1] == "0 rows, 0 B of matrices\n"


def test_prune_gives_way_to_a_run(quantwatch: Quantwatch, stored: Stored, db: Database) -> None:
    """Catches a command that says "done" although a run kept it from working."""
    stored.nightly(range(0, 20, 4))
    begin_run(db, run_id="RUN", check="nightly", config={}, started_at=datetime.now(UTC))
    code, out, err = quantwatch("db", "prune")
    assert (code, out) == (3, "0 rows, 0 B of matrices; the disk got 0 B back\n")
    assert "run RUN is being measured; call it again afterwards" in err
    code, _, err = quantwatch("db", "prune", "--dry-run")
    assert (code, "nothing would go now" in err) == (0, True)


def test_sizes_are_told(quantwatch: Quantwatch, stored: Stored) -> None:
    """Catches a table without its largest part, and a forecast where there is no history."""
    assert "too young for a forecast" in quantwatch("db", "sizes")[1]
    stored.nightly(range(5))
    code, out, _ = quantwatch("db", "sizes")
    assert code == 0
    assert all(word in out for word in ("token matrices", "measurement", "grows by", "free"))
    document = json.loads(quantwatch("db", "sizes", "--json")[1])
    assert {tier["name"] for tier in document["tiers"]} >= {"token matrices", "logs", "names"}
    assert document["bytes_per_day"] > 0


def test_backup_and_restore(quantwatch: Quantwatch, stored: Stored, tmp_path: Path) -> None:
    """Catches a restored database that the other commands can't read (X38)."""
    run = stored.add(1)
    other = f"sqlite:///{tmp_path / 'other.db'}"
    assert quantwatch("db", "backup", "copy")[0] == 0
    code, out, _ = quantwatch("db", "restore", "copy", database=other)
    assert (code, out) == (0, f"{other}: restored from copy\n")
    assert run in quantwatch("runs", "list", database=other)[1]
    assert quantwatch("db", "check", database=other)[0] == 0
    code, _, err = quantwatch("db", "restore", "copy", database=other)
    assert (code, "holds data already" in err) == (3, True)


@pytest.mark.parametrize(
    ("free", "days_left", "expected"),
    [
        (None, 10, "how much room its server has is not known here"),
        (5_000_000, 10, "5.0 MB of the disk are free: full in 5 days"),
        (5_000_000, 2, "5.0 MB of the disk are free: never full at this rate"),
    ],
)
def test_the_forecast_in_words(
    free: int | None, days_left: float, expected: str, database_url: str
) -> None:
    """Catches a forecast that is made up where nothing is known."""
    sizes = Sizes((), (), 2_000_000_000, 0, free, (Flow("t", 1e6, days_left),))
    assert forecast(sizes).endswith(expected)
    assert "2.0 GB in all, 0 B of it free inside; grows by 1.0 MB a day" in forecast(sizes)
