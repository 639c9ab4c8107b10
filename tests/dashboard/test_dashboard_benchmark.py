"""The promises of speed, kept on a small database by the script that prints them for a large one.

In processor time: a busy machine takes longer, but does no more.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZE = ("--checks", "8", "--nights", "20", "--layers", "6", "--block-nights", "1")
pytestmark = pytest.mark.slow


def printed(script: str, *words: str) -> Any:
    command = [sys.executable, str(BENCHMARKS / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    url = f"sqlite:///{tmp_path_factory.mktemp('filled')}/quantwatch.db"
    printed("fill.py", "--url", url, *SIZE)
    return printed(
        "dashboard.py", "--url", url, "--repeats", "8", "--paints", "0", "--sessions", "0"
    )


def test_every_page_is_measured(figures: Any) -> None:
    """Catches a page whose speed nobody knows."""
    assert {"Overview", "Run", "Alerts"} <= set(figures["pages"])
    assert figures["slowest_queries"]


def test_pages_are_quick(figures: Any) -> None:
    """Catches a page that builds or reads too much."""
    for name, page in figures["pages"].items():
        assert page["warm_cpu_ms"]["p95"] < 400, name
        assert page["cold_cpu_ms"]["p95"] < 1500, name
    assert max(query["p95_cpu_ms"] for query in figures["slowest_queries"]) < 100


def test_figures_stay_small(figures: Any) -> None:
    """Catches a figure that a browser chokes on."""
    drawn = [page["figures"] for page in figures["pages"].values()]
    assert sum(each["count"] for each in drawn) > 0
    assert max(each["most_cells"] for each in drawn) <= 200_000
    assert max(each["most_bytes"] for each in drawn) <= 2_000_000
