"""The faults of the field's comparison table, planted in the real model, through the command line.

Other tools were measured on exactly these (docs/performance.md has the full table on WikiText); here a
shorter text of the shipped suite, so the truths are stated as relations and not as figures.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantwatch.prompts import loading

pytestmark = [pytest.mark.model, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
EVERY_LAYER = list(range(30))


def english() -> str:
    data = Path(loading.__file__).parent / "data" / "core-v1.jsonl"
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    return "\n\n".join(x["text"] for x in lines if x["category"] == "prose_en")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the project's own script once; one JSON line per fault."""
    text = tmp_path_factory.mktemp("faults") / "text.txt"
    text.write_text(english())
    script = [sys.executable, str(ROOT / "benchmarks" / "faults.py")]
    command = [*script, "--text", str(text), "--prompts", "1"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {line["fault"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_an_identical_copy_is_bit_equal(found: dict[str, Any]) -> None:
    """Catches a tool that wants to see change."""
    line = found["identical"]
    assert (line["exit_code"], line["bit_equal"], line["kl"]) == (0, True, 0.0)
    assert (line["layers_differing"], line["culprit"], line["top1_agreement"]) == ([], None, 1.0)


def test_one_scaled_projection_is_named(found: dict[str, Any]) -> None:
    """Catches a fault that outputs hardly show: 5 % in one of 210 linears."""
    line = found["down_proj_1.05"]
    assert (line["exit_code"], line["culprit"]) == (1, "layers.17.mlp.down_proj")
    assert line["layers_differing"] == EVERY_LAYER[17:]
    assert {tuple(a) for a in line["alerts"]} == {("isolated-error-outlier", "layers.17")}


def test_a_nan_weight_is_located(found: dict[str, Any]) -> None:
    """Catches a green table of `nan ✓`."""
    line = found["nan_weight"]
    assert line["exit_code"] == 1
    assert line["first_nonfinite"] == {"scope": "layers.12.attention", "prompt": 0, "position": 0}
    assert line["kl"] is None


def test_rows_of_the_head_are_named(found: dict[str, Any]) -> None:
    """Catches a head without a tap, and layer 0 blamed for it."""
    line = found["head_rows"]
    assert (line["exit_code"], line["culprit"], line["layers_differing"]) == (1, "head", [])
    assert "rows 260, 281, 284" in line["culprit_words"]


def test_a_padded_vocabulary_is_no_fault(found: dict[str, Any]) -> None:
    """Catches padding ids that win, and a KL without renormalising."""
    line = found["wider_vocabulary"]
    assert (line["exit_code"], line["kl"], line["top1_agreement"]) == (0, 0.0, 1.0)
    assert 0 < line["leaked_mass"] < 0.2
    assert line["culprit"] is None


def test_int4_everywhere_is_ranked(found: dict[str, Any]) -> None:
    """Catches 'every tap red' without an order."""
    line = found["int4_g64"]
    assert line["exit_code"] == 1
    assert line["kl"] > 0.2
    errors = [row["isolated_error"] for row in line["worst_layers"]]
    assert errors == sorted(errors, reverse=True)


def test_swapped_tokens_are_refused(found: dict[str, Any]) -> None:
    """Catches two tokenizer entries that exchange meanings, reported as a layer-0 regression."""
    line = found["swapped_tokens"]
    assert line["exit_code"] == 2
    (error,) = line["error"]
    assert "260" in error
    assert "281" in error
