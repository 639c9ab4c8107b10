"""A recipe's calibration texts: the first of a suite, or chosen with the model."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from quantwatch.config.parsing import parse
from quantwatch.config.recipe_parts import CalibrationConfig, Selection
from quantwatch.config.recipes import RecipeConfig
from quantwatch.config.schema import VariantConfig
from quantwatch.errors import ConfigError, ModelError, PromptError
from quantwatch.models.loading import load_variant
from quantwatch.models.recipes import calibration_inputs
from quantwatch.pipeline.calibration import calibration_reader
from quantwatch_kernels.calibration.selection import SELECTIONS, select_samples

IDS = [
    torch.randint(3, 80, (5 + n % 4,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in range(12)
]


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 80, "hidden_size": 24, "intermediate_size": 32}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


def read(place: Path, model: Any, **keys: Any) -> Any:
    """What a recipe with this calibration gets, of a suite of twelve prompts of two categories."""
    rows = [{"token_ids": ids, "category": "ab"[n % 2]} for n, ids in enumerate(IDS)]
    (place / "ids.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = CalibrationConfig.model_validate({"suite": {"files": ["ids.jsonl"]}, **keys})
    recipe = RecipeConfig(weights="int4", granularity="channel", method="gptq", calibration=config)
    return calibration_inputs(recipe, model, None, calibration_reader(place))


def rows(inputs: Any) -> list[list[int]]:
    assert all(ids.shape[0] == 1 for ids in inputs.ids)
    return [ids[0].tolist() for ids in inputs.ids]


def test_names_are_the_kernels() -> None:
    """Catches a selection that can't be configured."""
    assert get_args(Selection) == ("first", *SELECTIONS)


def test_first_is_what_it_was(tmp_path: Path, model: Any) -> None:
    """Catches a default that reads more than it was asked for, or runs the model."""
    assert rows(read(tmp_path, None, skip=2, limit=3)) == IDS[2:5]
    assert rows(read(tmp_path, None, skip=10)) == IDS[10:]
    with pytest.raises(PromptError, match="skip = 12 leaves none"):
        read(tmp_path, model, skip=12)


def test_fewer_than_asked_for_is_said(tmp_path: Path, model: Any) -> None:
    """Catches 11 texts that pass as 64, and a note where nothing is missing."""
    assert read(tmp_path, model, limit=12).notes == ()
    assert read(tmp_path, model, skip=4, limit=8).notes == ()
    assert read(tmp_path, model, limit=13).notes == (
        "calibration: 12 of 13 prompts: there are no more",
    )
    assert read(tmp_path, model, skip=1).notes == (
        "calibration: 11 of 64 prompts: there are no more",
    )
    ended = {"files": ["ids.jsonl"], "limit": 6}
    assert read(tmp_path, model, suite=ended, skip=2, limit=5).notes == (
        "calibration: 4 of 5 prompts: there are no more",
    )


# Hierarchical wants room for 20 generated tokens, and says so itself.
@pytest.mark.parametrize("selection", sorted({"first", *SELECTIONS} - {"hierarchical"}))
def test_texts_beyond_the_context_are_refused(tmp_path: Path, model: Any, selection: Any) -> None:
    """Catches scales found at positions that the model was not made for; skipped prompts count not.

    The lengths are 5, 6, 7, 8, 5, …
    """
    model.config.max_position_embeddings = 7
    words = r"prompt 3 \(and 2 more\), has 8 tokens, the model's context is 7"
    with pytest.raises(PromptError, match=words):
        read(tmp_path, model, limit=12, selection=selection)
    suite = {"files": ["ids.jsonl"], "limit": 7}
    found = read(tmp_path, model, suite=suite, skip=4, limit=3, selection=selection)
    assert sorted(rows(found)) == sorted(IDS[4:7])
    model.config.max_position_embeddings = 8
    assert len(rows(read(tmp_path, model, limit=12, selection=selection))) == 12


@pytest.mark.slow
@pytest.mark.parametrize("name", SELECTIONS)
def test_every_selection_reaches_the_kernel(tmp_path: Path, model: Any, name: Any) -> None:
    """Catches skip, seed, categories or the pool's end lost on the way."""
    seed = {"seed": 7} if name in ("random", "hierarchical") else {}
    found = read(tmp_path, model, skip=2, limit=4, selection=name, **seed)
    pool = [torch.tensor([ids]) for ids in IDS[2:]]
    labels = ["ab"[n % 2] for n in range(2, 12)]
    expected = select_samples(model, pool, 4, name, labels=labels, **seed)
    assert rows(found) == [IDS[2 + n] for n in expected.indices]
    assert found.notes == tuple(f"calibration: {note}" for note in expected.notes)
    assert bool(found.notes) == (name == "hierarchical")


def test_a_suites_own_limit_ends_the_pool(tmp_path: Path, model: Any) -> None:
    """Catches a draw out of prompts that the suite leaves out."""
    suite = {"files": ["ids.jsonl"], "limit": 6}
    found = rows(read(tmp_path, model, suite=suite, skip=2, limit=4, selection="random"))
    assert sorted(found) == sorted(IDS[2:6])


def test_what_can_not_be_chosen(tmp_path: Path, model: Any) -> None:
    """Too many, a model without attention, a seed for nothing: named, not worked around."""
    with pytest.raises(PromptError, match="limit = 64 can't be chosen by random out of 12"):
        read(tmp_path, model, selection="random")
    sizes = {"vocab_size": 80, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    mamba = MambaForCausalLM(MambaConfig(**sizes)).eval()
    with pytest.raises(ModelError, match=r"calibration: sample 0 .* gives no attention weights"):
        read(tmp_path, mamba, limit=4, selection="entropy-attention")
    with pytest.raises(ConfigError, match="seed is not allowed with selection = 'coverage'"):
        parse(CalibrationConfig, {"suite": "core-v1", "selection": "coverage", "seed": 1}, "x")


@pytest.mark.slow
def test_a_candidate_says_how_its_texts_were_chosen(tmp_path: Path, model: Any) -> None:
    """Catches notes that are lost, and two choices that pass as one recipe."""
    (tmp_path / "ids.jsonl").write_text("\n".join(json.dumps({"token_ids": i}) for i in IDS))
    model.save_pretrained(tmp_path / "tiny")
    loaded: dict[int, str] = {}
    for seed in (0, 0, 1):
        calibration = {"suite": {"files": ["ids.jsonl"]}, "limit": 4, "seed": seed}
        recipe = {
            "weights": "int8",
            "granularity": "channel",
            "smooth": 0.5,
            "activations": {"format": "uint8", "granularity": "tensor", "static": True},
            "calibration": {**calibration, "selection": "hierarchical"},
        }
        config = VariantConfig.model_validate({"model": "tiny", "recipe": recipe})
        variant = load_variant(
            "candidate",
            config,
            base_dir=tmp_path,
            cache_dir=tmp_path,
            calibrate=calibration_reader(tmp_path),
        ).variant
        assert all(isinstance(note, str) for note in variant.notes)
        assert any("calibration: " in note and "of 12 samples" in note for note in variant.notes)
        digest = variant.fingerprint.recipe_sha
        assert loaded.setdefault(seed, digest) == digest
    assert loaded[0] != loaded[1]
    assert any(note.startswith("smoothing: ") for note in variant.notes)
