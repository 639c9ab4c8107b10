"""Planted faults are where they were declared, and nowhere else."""

from typing import Any

import pytest
import torch

from quantwatch.errors import ModelError

PLACES = {
    "linear": ("layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj.weight"),
    "norm": ("final_norm", "model.norm.weight"),
    "embedding": ("embedding", "model.embed_tokens.weight"),
    "head": ("head", "lm_head.weight"),
}


@pytest.mark.parametrize(("scope", "changed"), PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_scale_changes_one_weight(
    scope: str, changed: str, tied: bool, make_folder: Any, load: Any
) -> None:
    """Catches a fault in another place, in two places (tied weights), or of another size."""
    folder = make_folder(tie_word_embeddings=tied)
    clean, broken = load(folder), load(folder, faults=[{"scope": scope, "scale": 1.25}])
    state = broken.module.state_dict()
    for name, value in clean.module.state_dict().items():
        assert torch.equal(state[name], value * 1.25 if name == changed else value), name
    notes = broken.variant.notes
    assert f"fault planted: {scope} weight × 1.25" in notes
    untied = [note for note in notes if "was untied from" in note]
    assert bool(untied) == (tied and scope in ("embedding", "head"))
    assert broken.variant.size_bytes == clean.variant.size_bytes


def test_nan_is_one_weight(make_folder: Any, load: Any) -> None:
    """Catches a NaN that spreads over a row, or row and column exchanged."""
    fault = {"scope": "layers.0.attention.k_proj", "nan_at": [3, 5]}
    weight = load(make_folder(), faults=[fault]).module.model.layers[0].self_attn.k_proj.weight
    assert weight.isnan().nonzero().tolist() == [[3, 5]]


def test_faults_add_up(make_folder: Any, load: Any) -> None:
    """Catches all but the last fault being dropped."""
    folder, scope = make_folder(), "layers.0.mlp.up_proj"
    faults = [{"scope": scope, "scale": 2.0}, {"scope": scope, "scale": 3.0}]
    clean, broken = load(folder), load(folder, faults=faults)
    layers = [model.module.model.layers[0].mlp.up_proj.weight for model in (clean, broken)]
    assert torch.equal(layers[1], layers[0] * 6)


WRONG = {
    "misspelt": ({"scope": "layers.1.mlp.down_prj", "scale": 2.0}, "close: layers.1.mlp.down_proj"),
    "layer too high": ({"scope": "layers.7.mlp.down_proj", "scale": 2.0}, "does not exist"),
    "no weight": (
        {"scope": "layers.1.mlp", "scale": 2.0},
        "no weight of its own; name one inside it: layers.1.mlp.gate_proj, layers.1.mlp.up_proj",
    ),
    "row too high": (
        {"scope": "layers.1.mlp.down_proj", "nan_at": [32, 0]},
        r"nan_at = \[32, 0\]: the weight of layers.1.mlp.down_proj has shape \(32, 64\)",
    ),
    "nan in a norm": ({"scope": "final_norm", "nan_at": [0, 0]}, r"has shape \(32,\)"),
}


@pytest.mark.parametrize(("fault", "wanted"), WRONG.values(), ids=WRONG.keys())
def test_wrong_fault(fault: dict[str, Any], wanted: str, make_folder: Any, load: Any) -> None:
    """Catches a fault that is silently not planted: the demo would prove nothing."""
    with pytest.raises(ModelError, match=wanted):
        load(make_folder(), faults=[fault])
