"""Merged projections in real architectures: same logits, one weight, hooks, copies, refusals."""

import copy
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.serve.merged_qkv import merge_qkv, split_qkv
from quantwatch_kernels.serve.replace import replace

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {}, "Qwen2": {}, "Qwen3": {}, "Gemma": {}, "Gemma2": {},
    "Gemma3Text": {}, "Mixtral": {"num_local_experts": 4},
}  # fmt: skip
IDS = torch.arange(18).view(2, 9) * 7 % 64


def made(family: str, **changes: Any) -> Any:
    name = {"Gemma3Text": "Gemma3ForCausalLM"}.get(family, f"{family}ForCausalLM")
    settings = {**SIZES, **FAMILIES[family], **changes}
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**settings))
    for _, parameter in model.named_parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids, use_cache=False).logits
    return found


def projections(model: Any, layer: int = 0) -> list[nn.Linear]:
    attention = model.model.layers[layer].self_attn
    return [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")]


@pytest.mark.parametrize(
    ("family", "biased"),
    [
        *((f, False) for f in FAMILIES),
        *((f, True) for f in FAMILIES if f not in ("Mistral", "Mixtral")),
    ],
)
def test_same_logits(family: str, biased: bool) -> None:
    """Catches a wrong split with 6 heads on 2, a bias of the wrong part, a cache that is lost."""
    model = made(family, **({"attention_bias": True} if biased and family != "Qwen2" else {}))
    before, state = logits(model), copy.deepcopy(model.state_dict())
    generated = model.generate(IDS, max_new_tokens=5, do_sample=False)
    report = merge_qkv(model)
    assert len(report.replaced) == 2
    assert not report.skipped
    after = logits(model)
    assert float((after - before).abs().max()) <= 1e-6 * float(before.abs().max())
    assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), generated)
    assert {n: tuple(p.shape) for n, p in model.state_dict().items()} == {
        n: tuple(p.shape) for n, p in state.items()
    }
    assert split_qkv(model) == 2
    assert torch.equal(logits(model), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(type(part) is nn.Linear for part in projections(model))
    assert len({part.weight.untyped_storage().data_ptr() for part in projections(model)}) == 3


def test_one_product_of_one_weight() -> None:
    """Catches three products under another name, and a weight that is stored twice."""
    model = made("Llama")
    merge_qkv(model)
    linear, widths = nn.functional.linear, []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        widths.append(len(weight))
        return linear(x, weight, bias)

    with mock.patch.object(nn.functional, "linear", counted):
        logits(model)
    assert widths.count((6 + 2 + 2) * 8) == 2
    assert not {48, 16} & set(widths)
    parts = projections(model)
    storages = {part.weight.untyped_storage().data_ptr() for part in parts}
    assert len(storages) == 1
    assert parts[0].weight.untyped_storage().nbytes() == 80 * 24 * 4
    with torch.no_grad():
        parts[1].weight.mul_(2)  # what is written into one module is in the product
        x = torch.randn(3, 24)
        parts[0](x)
        assert torch.allclose(parts[1](x), linear(x, parts[1].weight), atol=1e-6)


def test_hooks_and_other_inputs() -> None:
    """Catches a result that is handed out for another input, or for one that was changed since."""
    model = made("Qwen2")
    seen: list[Tensor] = []
    plain = copy.deepcopy(model)
    merge_qkv(model)
    q, k, v = projections(model)
    k.register_forward_hook(lambda _m, _a, out: seen.append(out))
    logits(model)
    x, other = torch.randn(2, 24), torch.randn(2, 24)
    with torch.no_grad():
        own = [part(x) for part in projections(plain)]
        assert torch.allclose(q(x), own[0], atol=1e-6)
        assert torch.allclose(k(other), projections(plain)[1](other), atol=1e-6)
        assert torch.allclose(v(x), own[2], atol=1e-6)
        assert torch.allclose(v(x), own[2], atol=1e-6)  # asked twice
        q(x)
        x.mul_(2)
        assert torch.allclose(k(x), projections(plain)[1](x), atol=1e-6)
    assert seen[0].shape == (2, 9, 16)


def test_a_model_that_was_moved_or_copied() -> None:
    """Catches a product with the weights that the model had before."""
    model = made("Gemma")
    merge_qkv(model)
    again = copy.deepcopy(model).double()
    exact = made("Gemma").double()
    assert torch.allclose(logits(again), logits(exact), atol=1e-12)
    assert projections(again)[0].weight.dtype == torch.float64
    for part in projections(again):
        part.weight.data.zero_()
    assert torch.allclose(logits(model), logits(made("Gemma")), atol=1e-5)  # the first is unharmed


def test_gradients_are_each_module_s_own() -> None:
    """Catches weights that get no gradient any more."""
    model, plain = made("Llama"), made("Llama")
    merge_qkv(model)
    for each in (model, plain):
        each(IDS, labels=IDS, use_cache=False).loss.backward()
    for a, b in zip(projections(model), projections(plain), strict=True):
        assert a.weight.grad is not None
        assert b.weight.grad is not None
        assert torch.allclose(a.weight.grad, b.weight.grad, atol=1e-7)


def test_threads_do_not_mix() -> None:
    """Catches a result that waits for one thread and is taken by another."""
    model = made("Llama")
    merge_qkv(model)
    texts = [torch.full((1, 7), number) for number in range(3, 9)]
    wanted = [logits(model, text) for text in texts]
    found: list[Tensor | None] = [None] * len(texts)

    def run(number: int) -> None:
        for _ in range(3):
            found[number] = logits(model, texts[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(wanted, found, strict=True):
        assert other is not None
        assert torch.equal(one, other)
    group: Any = projections(model)[0]._group
    assert not group.waiting


def test_saved_and_loaded(tmp_path: Path) -> None:
    """Catches parameters that share memory and can't be saved."""
    model = made("Llama")
    before = logits(model)
    merge_qkv(model)
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), before)


def test_beside_fused_operators() -> None:
    """Catches two replacements that get in each other's way."""
    model = made("Qwen3")
    before = logits(model)
    merge_qkv(model)
    assert len(replace(model).replaced) > 10
    assert float((logits(model) - before).abs().max()) <= 2e-6 * float(before.abs().max())


def test_shared_attention() -> None:
    """A module, or all three weights, shared between layers: merged once, one storage."""
    model = made("Llama")
    for name in ("q_proj", "k_proj", "v_proj"):
        one, other = (getattr(layer.self_attn, name) for layer in model.model.layers)
        other.weight = one.weight
    before = logits(model)
    assert len(merge_qkv(model).replaced) == 2
    assert float((logits(model) - before).abs().max()) <= 1e-6 * float(before.abs().max())
    assert projections(model, 0)[2].weight is projections(model, 1)[2].weight


class Lora(nn.Linear):
    """A linear that isn't plain."""


def refused() -> dict[str, Any]:
    lora, partly, shared, half, quantized = (made("Llama") for _ in range(5))
    lora.model.layers[0].self_attn.k_proj.__class__ = Lora
    partly.model.layers[0].self_attn.v_proj.bias = nn.Parameter(torch.zeros(16))
    keys = [projections(shared, layer)[1] for layer in (0, 1)]
    keys[0].weight = keys[1].weight
    projections(half)[0].half()
    quantize_(quantized, Recipe.named("int8-channel"), execution="reference")
    return {
        "k_proj is a Lora, not a plain linear": lora,
        "only some of its projections have a bias": partly,
        "a part of its weights is shared with another module": shared,
        "its projections differ in dtype, device or input width": half,
        "q_proj is a PackedLinear, not a plain linear": quantized,
    }


def test_refused_with_the_reason() -> None:
    """Catches a module whose own forward would be lost."""
    for reason, model in refused().items():
        parts = [type(part) for part in projections(model)]
        report = merge_qkv(model)
        assert [each.reason for each in report.skipped][:1] == [reason]
        assert report.skipped[0].path == "model.layers.0.self_attn"
        assert [type(part) for part in projections(model)] == parts
    model = made("Llama")
    merge_qkv(model)
    with pytest.raises(ValueError, match="q_proj is merged already; split the model first"):
        merge_qkv(model)


def test_other_attentions_are_told() -> None:
    """Catches an attention that is left out without a word: keys of another input."""
    config = transformers.BartConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    report = merge_qkv(transformers.BartModel(config))
    assert not report.replaced
    assert {each.reason for each in report.skipped} == {"not a self-attention of a known kind"}
