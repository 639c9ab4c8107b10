"""Recipes of a configuration on loaded models: what is quantized, what isn't, what it weighs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from quantwatch.errors import ModelError

IDS = torch.arange(3, 30)[None]
DOWN = "layers.1.mlp.down_proj"


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.module.state_dict())


def _int8(weight: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize by the textbook in float64: symmetric, one scale per row, ±127."""
    rows = weight.double()
    scale = rows.abs().amax(1, keepdim=True) / 127
    return (rows / scale).round().clamp(-127, 127) * scale


def test_int8_changes_the_linear_layers_and_nothing_else(make_folder: Any, load: Any) -> None:
    """Catches a recipe that isn't applied, or reaches norms, embedding or head."""
    folder = make_folder()
    plain, quantized = load(folder), load(folder, recipe="int8-channel")
    after = _weights(quantized)
    for name, weight in _weights(plain).items():
        if name.endswith("_proj.weight"):
            assert not torch.equal(after[name], weight), name
            torch.testing.assert_close(after[name].double(), _int8(weight), rtol=1e-6, atol=1e-9)
        else:
            assert torch.equal(after[name], weight), name
    assert quantized.variant.execution == "dequantized"
    assert quantized.variant.size_bytes < plain.variant.size_bytes


@pytest.mark.parametrize("execution", ["dequantized", "reference", "aten"])
def test_every_execution_runs_and_says_so(execution: str, make_folder: Any, load: Any) -> None:
    """Catches an execution that falls back to another one, or breaks a layer."""
    folder = make_folder(hidden_size=64, intermediate_size=128)
    plain = load(folder).module(IDS).logits
    model = load(folder, recipe="int8-channel", execution=execution)
    logits = model.module(IDS).logits.float()
    assert model.variant.execution == execution
    assert 0 < (logits - plain).abs().max() < 0.05 * plain.abs().max()


@pytest.mark.parametrize("execution", ["dequantized", "reference"])
def test_scale_fault_over_int8_is_the_scale(execution: str, make_folder: Any, load: Any) -> None:
    """Catches the demo's fault being swallowed by the quantizer, or moving codes."""
    folder = make_folder()
    fault = {"scope": DOWN, "scale": 1.25}
    options = {"recipe": "int8-channel", "execution": execution}
    clean, broken = load(folder, **options), load(folder, **options, faults=[fault])
    inputs = torch.eye(64)
    layers = [model.module.model.layers[1].mlp.down_proj(inputs) for model in (clean, broken)]
    exact = execution == "dequantized"
    torch.testing.assert_close(
        layers[1], layers[0] * 1.25, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-9
    )
    assert broken.variant.size_bytes == clean.variant.size_bytes


def test_nan_fault_over_int8_stays_one_weight(make_folder: Any, load: Any) -> None:
    """Catches a NaN that becomes a number, or poisons the scale of its row."""
    fault = {"scope": DOWN, "nan_at": [3, 5]}
    model = load(make_folder(), recipe="int8-channel", faults=[fault])
    weight = model.module.model.layers[1].mlp.down_proj.weight
    assert weight.isnan().nonzero().tolist() == [[3, 5]]


def test_nan_fault_in_packed_codes_is_refused(make_folder: Any, load: Any) -> None:
    """Catches an integer code standing in for NaN."""
    fault = {"scope": DOWN, "nan_at": [3, 5]}
    with pytest.raises(ModelError, match='use execution = "dequantized"'):
        load(make_folder(), recipe="int8-channel", execution="reference", faults=[fault])


def test_excluded_scopes_are_left_and_listed(make_folder: Any, load: Any) -> None:
    """Catches an exclude that isn't passed on, or isn't reported."""
    folder = make_folder()
    table = {"weights": "int8", "granularity": "channel", "exclude": ["head", "layers.0.*"]}
    plain, quantized = load(folder), load(folder, recipe=table)
    same = {n for n, w in _weights(plain).items() if torch.equal(_weights(quantized)[n], w)}
    assert "model.layers.0.mlp.up_proj.weight" in same
    assert "model.layers.1.mlp.up_proj.weight" not in same
    assert "layers.0.mlp.up_proj" in dict(quantized.variant.skipped)


def test_tied_head_may_be_quantized_only_together_with_a_word(make_folder: Any, load: Any) -> None:
    """Catches a quantized head that changes the embedding behind the reader's back."""
    folder = make_folder(tie_word_embeddings=True)
    table = {"weights": "int8", "granularity": "channel", "exclude": []}
    plain, quantized = load(folder), load(folder, recipe=table)
    embedding = "model.embed_tokens.weight"
    assert torch.equal(_weights(quantized)[embedding], _weights(plain)[embedding])


def test_layers_that_another_back_end_computes_are_noted(make_folder: Any, load: Any) -> None:
    """Catches a silent fall back: the native int8 kernel takes no groups."""
    table = {"weights": "int8", "granularity": "group", "group_size": 16}
    model = load(make_folder(), recipe=table, execution="aten")
    (note,) = [note for note in model.variant.notes if note.startswith("computed dequantized")]
    assert "one scale per channel" in note
    assert note.endswith("layers.0.attention.v_proj and 11 more")


def test_recipe_that_converts_nothing_is_refused(make_folder: Any, load: Any) -> None:
    """Catches a candidate that is the reference under another name."""
    table = {"weights": "int8", "granularity": "channel", "exclude": ["head", "layers.*"]}
    with pytest.raises(ModelError, match=r"the recipe can't be applied: .* convert no layer"):
        load(make_folder(), recipe=table)


def test_every_linear_is_converted_or_listed(tmp_path: Path, load: Any) -> None:
    """Catches layers that a recipe passes over in silence: fused experts, GPT-2's Conv1D, routers."""
    torch.manual_seed(0)
    moe = MixtralForCausalLM(
        MixtralConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=300,
            num_local_experts=4,
        )
    )
    gpt = GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=300, bos_token_id=0, eos_token_id=0)
    )
    for name, module in (("moe", moe), ("gpt", gpt)):
        module.save_pretrained(tmp_path / name)
        plain, quantized = load(name), load(name, recipe="int8-channel")
        skipped = dict(quantized.variant.skipped)
        after = _weights(quantized)
        scopes = {f"{path}.weight": scope for scope, path in quantized.anatomy.linears.items()}
        for weight, value in _weights(plain).items():
            same = weight in after and torch.equal(after[weight], value)
            if scopes.get(weight) is not None:
                assert same == (scopes[weight] in skipped), weight
        if name == "moe":
            assert "layers.0.mlp.gate" in skipped
            assert not any("experts" in scope for scope in skipped)
            stack = "model.layers.1.mlp.experts.down_proj"
            before = plain.module.get_parameter(stack)
            assert not torch.equal(quantized.module.get_parameter(stack), before)
