"""The same weights under AVX2 against a baseline from AVX-512: rounding, not a regression."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.model, pytest.mark.slow]

CONFIG = """
schema_version = 1
[checks.nightly]
suite = { files = ["prompts.json"] }
threads = 1
reference = { model = "smollm2-135m" }
candidates = [{ name = "int8", model = "smollm2-135m", recipe = "int8-channel" }]
"""


def run(folder: Path, capability: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quantwatch.cli", *arguments]
    env = os.environ | {
        "ATEN_CPU_CAPABILITY": capability,
        "QUANTWATCH_DATABASE_URL": f"sqlite:///{folder / 'runs.db'}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason=f"this CPU has {torch.backends.cpu.get_cpu_capability()}, no AVX-512",
)
def test_another_instruction_set_is_below_the_noise(tmp_path: Path) -> None:
    """Catches the false alarm of an exact comparison across CPUs."""
    (tmp_path / "quantwatch.toml").write_text(CONFIG)
    texts = [
        "The lighthouse keeper counted the ships that passed before dawn.",
        "x = [i * i for i in range(10)]",
    ]
    (tmp_path / "prompts.json").write_text(json.dumps(texts))
    first = run(tmp_path, "avx512", "check", "run", "nightly", "--json")
    assert first.returncode == 0, first.stderr
    exported = run(tmp_path, "avx512", "baseline", "export", "latest", "baseline.json")
    assert exported.returncode == 0, exported.stderr
    second = run(
        tmp_path, "avx2", "check", "run", "nightly", "--baseline", "baseline.json", "--json"
    )
    assert second.returncode == 0, second.stderr
    before, after = (json.loads(done.stdout)["candidates"][0] for done in (first, second))
    assert after["verdict"] == "pass"
    assert after["logit_kl"]["mean"] != 0
    assert after["logit_kl"]["mean"] == pytest.approx(before["logit_kl"]["mean"], rel=1e-4)
