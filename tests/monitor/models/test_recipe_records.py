"""What a loaded candidate says of its recipe, and in which state the model is calibrated."""

import json
import sys
import types
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quantwatch.config.parsing import parse
from quantwatch.config.recipe_parts import Selection
from quantwatch.config.recipes import RecipeConfig, recipe_config
from quantwatch.config.schema import VariantConfig
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant
from quantwatch.pipeline.calibration import calibration_reader

IDS = [
    torch.randint(3, 80, (12,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in range(8)
]


def build() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 80, "hidden_size": 24, "intermediate_size": 32}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attention_dropout=0.5))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    build().save_pretrained(tmp_path / "tiny")
    (tmp_path / "ids.jsonl").write_text("\n".join(json.dumps({"token_ids": ids}) for ids in IDS))
    return tmp_path


def load(place: Path, **keys: Any) -> LoadedModel:
    config = parse(VariantConfig, keys, "t")
    reader = calibration_reader(place)
    return load_variant("c", config, base_dir=place, cache_dir=place / "cache", calibrate=reader)


WRITTEN = {
    "plain": 'weights = "int4"\ngranularity = "group"\ngroup_size = 8\n',
    "layers": 'weights = "int8"\ngranularity = "channel"\n[[layers]]\nmatch = "*.down_proj"\n',
    "calibrated": 'weights = "int4"\ngranularity = "channel"\nmethod = "gptq"\n'
    '[calibration]\nsuite = { files = ["ids.jsonl"] }\nlimit = 2\n',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_recipe_files_content_is_kept(place: Path, name: str) -> None:
    """Catches a stored run that names a file which says something else by now."""
    path = place / "r.toml"
    path.write_text(WRITTEN[name])
    source = json.loads(json.dumps(load(place, model="tiny", recipe="r.toml").variant.source))
    told = recipe_config("r.toml", place)
    path.write_text('weights = "int2"\ngranularity = "channel"\n')
    assert source["recipe"] == "r.toml"
    assert parse(RecipeConfig, source["recipe_content"], "stored") == told
    again = load(place, model="tiny", recipe="r.toml").variant.source
    assert again["recipe_content"] == {"weights": "int2", "granularity": "channel"}


def test_only_a_file_needs_its_content_beside_it(place: Path) -> None:
    """Catches a recipe that is stored twice."""
    table = {"weights": "int8", "granularity": "channel"}
    for recipe in ("int8-channel", table, None):
        assert "recipe_content" not in load(place, model="tiny", recipe=recipe).variant.source


@pytest.mark.slow
@pytest.mark.parametrize("selection", get_args(Selection))
def test_a_model_in_training_mode_is_calibrated_in_evaluation_mode(
    place: Path, monkeypatch: pytest.MonkeyPatch, selection: str
) -> None:
    """Catches a choice of texts that a factory's dropout makes, or refuses."""
    module: Any = types.ModuleType("a_factory_in_training")
    module.build = lambda: (build().train(), None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    suite = {"files": ["ids.jsonl"]}
    recipe = {
        **{"weights": "int4", "granularity": "channel", "method": "gptq"},
        "calibration": {"suite": suite, "limit": 3, "selection": selection},
    }
    factory = {"factory": f"{module.__name__}:build", "allow_code": True}
    first, second = (load(place, **factory, recipe=recipe) for _ in range(2))
    saved = load(place, model="tiny", recipe=recipe)
    assert not first.module.training
    for other in (second, saved):
        assert [ids.tolist() for ids in first.calibrated_on] == [
            ids.tolist() for ids in other.calibrated_on
        ]
    assert len(first.calibrated_on) == 3
