"""`quantwatch attribute` from a stored run to a recipe file, on a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.monitor.tiny_models import save_word_model

from quantwatch.config.recipes import load_recipe

Run = Callable[..., Any]
CONFIG = """
schema_version = 1
[checks.nightly]
reference = { model = "tiny" }
suite = { files = ["prompts.json"] }
isolated_fraction = 0
lens_positions = 0
rules = [
  { name = "kl", metric = "logit_kl", threshold = 1e-30 },
  { name = "layer-kl", enabled = false },
  { name = "isolated-error-outlier", enabled = false },
]
[[checks.nightly.candidates]]
name = "int6"
model = "tiny"
recipe = { weights = "int6", granularity = "channel", exclude = ["router"] }
[[checks.nightly.candidates]]
name = "half"
model = "tiny"
dtype = "bfloat16"
"""


@pytest.fixture
def measured(run: Run, place: Path) -> Run:
    """A run of a tiny model that fails its check."""
    save_word_model(place / "tiny", 96, scale=5.0)
    texts = [" ".join(f"w{(i * 7 + j) % 96}" for j in range(8 + i)) for i in range(4)]
    (place / "prompts.json").write_text(json.dumps(texts))
    (place / "quantwatch.toml").write_text(CONFIG)
    outcome = run("check", "run", "nightly", "--yes")
    assert outcome.code == 1, outcome.err
    return run


@pytest.mark.slow
def test_from_a_run_to_a_recipe(measured: Run, place: Path) -> None:
    """Catches what is printed, stored and written telling different things."""
    words = ("attribute", "nightly", "--candidate", "int6")
    table = measured(*words, "--no-store")
    assert table.code == 0, table.err
    assert (
        "controls: nothing swapped, run again at 4 boundaries: exactly 0 at each; all" in table.out
    )
    assert "layers.1" in table.out
    found = json.loads(measured(*words, "--json", "--seed", "3", "--detail", "part").out)
    assert (found["candidate"], found["num_boundaries"], found["seed"]) == ("int6", 4, 3)
    assert found["together_kl"] == found["kl"]
    parts = {part["scope"]: part for part in found["parts"]}
    assert list(parts) == [
        "embedding", "layers.0.attention", "layers.0.mlp", "layers.0", "layers.1.attention",
        "layers.1.mlp", "layers.1", "final_norm", "head",
    ]  # fmt: skip
    assert sum(p["share"] for p in parts.values() if p["is_whole"]) == pytest.approx(
        found["additivity"]
    )
    assert parts["embedding"]["direction"] is None
    # A threshold that only the reference meets: no recipe, and no file that looks like one.
    out = measured(*words, "--out", "never.toml")
    assert out.code == 0, out.err
    assert (
        "never.toml is not written: none is enough that leaves anything to quantize; 2 of 3 parts"
        in out.err
    )
    assert not (place / "never.toml").exists()
    # What the run says of its rules decides, so another run is needed for other rules.
    kl = parts["head"]["kl"] * 1.5
    (place / "quantwatch.toml").write_text(CONFIG.replace("1e-30", f"{kl!r}"))
    assert measured("check", "run", "nightly", "--yes").code == 1
    out = measured(*words, "--out", "restored.toml", "--tries", "4", "--json")
    assert out.code == 0, out.err
    restored = json.loads(out.out)["restoration"]
    assert restored["verdict"] == "pass"
    recipe = load_recipe(place / "restored.toml")
    assert sorted(rule.match for rule in recipe.layers) == sorted(
        "head" if scope == "head" else f"{scope}.*" for scope in restored["scopes"]
    )
    assert 0 < restored["kl"] <= kl


@pytest.mark.slow
def test_what_is_refused(measured: Run, place: Path) -> None:
    """Catches an hour of measuring before a mistake is told, and shares of another model."""
    for words, message in (
        ((), "name one with --candidate; measured were: int6, half"),
        (("--candidate", "int6", "--out", "it.json"), "a recipe is a .toml file"),
        (("--candidate", "half", "--out", "it.toml"), "half has no recipe that a layer"),
        (("--candidate", "int6", "--tokens", "3"), "the shortest prompt of the suite has 8"),
    ):
        outcome = measured("attribute", "nightly", *words)
        assert outcome.code == 2, outcome.err
        assert message in outcome.err
    assert measured("attribute", "nightly", "--candidate", "half", "--tokens", "30").code == 0
    save_word_model(place / "tiny", 96, scale=4.0)
    outcome = measured("attribute", "nightly", "--candidate", "int6")
    assert outcome.code == 2
    assert "reference is not what was measured: weights_sha was" in outcome.err
