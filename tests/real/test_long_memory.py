"""Memory must not grow with a prompt's length beyond the KV caches: in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "long_context.py"


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Any:
    command = [sys.executable, str(SCRIPT), "--lengths", "4096", "16384", "--chunk", "64"]
    home = str(tmp_path_factory.mktemp("home"))
    env = {"PATH": "/usr/bin:/bin", "HOME": home, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads(done.stdout)["lengths"]


def test_four_times_the_tokens_take_only_more_cache(lengths: Any) -> None:
    """Catches traces, logits or observations of a whole prompt, a cache that is held twice, a mask.

    16,384 tokens leave 24 MB of keys and values more than 4,096; the reference's hidden states
    alone would be 25, masks of 64 × length 4, and objects for each piece that was measured 2. A
    peak of a process moves by up to 1.4 MB from one to the next, both lengths alike.
    """
    short, long = lengths
    assert long["kv_cache_mb"] == 4 * short["kv_cache_mb"] == 32.0
    ours = [each["beyond_kv_mb"] - each["bare_beyond_kv_mb"] for each in lengths]
    assert ours[1] <= ours[0] + 2.0, lengths
    assert long["bare_beyond_kv_mb"] <= short["bare_beyond_kv_mb"] + 2.0, lengths
    assert long["beyond_kv_mb"] <= short["beyond_kv_mb"] + 3.0, lengths
