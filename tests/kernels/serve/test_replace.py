"""Fused operators in real architectures: same logits and gradients, hooks, state, and the report."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from quantwatch_kernels.registry import fallbacks
from quantwatch_kernels.serve.replace import Report, replace, restore

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Configuration → norms, MLPs and layers that are replaced.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "Llama": ({}, (5, 2, 2)),
    "Mistral": ({}, (5, 2, 2)),
    "Qwen2": ({}, (5, 2, 2)),
    "Qwen3": ({}, (9, 2, 2)),
    "Gemma": ({"hidden_act": "gelu_pytorch_tanh"}, (5, 2, 2)),
    "Gemma2": ({}, (9, 2, 2)),
    "Gemma3Text": ({}, (13, 2, 2)),
    "Qwen2Moe": ({**MOE, "shared_expert_intermediate_size": 16}, (5, 2, 2)),
    "Qwen3Moe": (MOE, (9, 0, 2)),
    "Mixtral": ({"num_local_experts": 4}, (5, 0, 2)),
}
IDS = torch.arange(18).view(2, 9) * 7 % 64


def made(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    config_kind = getattr(transformers, f"{family}Config")
    name = {"Gemma3Text": "Gemma3ForCausalLM"}.get(family, f"{family}ForCausalLM")
    torch.manual_seed(0)
    model = getattr(transformers, name)(config_kind(**{**SIZES, **FAMILIES[family][0], **changes}))
    for path, parameter in model.named_parameters():
        # Weights of norms are ones or zeros, which hide what is done with them.
        scale = 0.2 if "norm" in path else 0.1
        parameter.data.add_(scale * torch.randn(parameter.shape))
    return model.to(dtype).eval()


def count(report: Report) -> tuple[int, int, int]:
    kinds = Counter(
        "norm" if r.kind.endswith("Norm") else "mlp" if r.kind.endswith("MLP") else "layer"
        for r in report.replaced
    )
    return kinds["norm"], kinds["mlp"], kinds["layer"]


def loss_gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_and_gradients(family: str) -> None:
    """Catches 1 + w taken for w, a lost residual, norms in the wrong place, arguments that get lost."""
    model = made(family)
    with torch.no_grad():
        before = model(IDS).logits
        generated = model.generate(IDS, max_new_tokens=5, do_sample=False)
    gradients = loss_gradients(model)
    report = replace(model)
    assert count(report) == FAMILIES[family][1], report
    with torch.no_grad():
        after = model(IDS).logits
        assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), generated)
    assert float((after - before).abs().max()) < 2e-6 * float(before.abs().max())
    for name, grad in loss_gradients(model).items():
        assert float((grad - gradients[name]).abs().max()) < 2e-5 * float(
            gradients[name].abs().max() + 1e-3
        ), name
    assert not fallbacks()


def test_bfloat16_is_as_near_to_float64_as_the_model_is() -> None:
    """One rounding less in each MLP: on average no farther than the model's own modules."""
    exact = made("Llama", torch.bfloat16).double()
    model = made("Llama", torch.bfloat16)
    with torch.no_grad():
        right = exact(IDS).logits
        before = (model(IDS).logits.double() - right).square().mean()
        replace(model)
        after = (model(IDS).logits.double() - right).square().mean()
    assert float(after) < 1.1 * float(before)


def test_hooks_state_and_class_stay() -> None:
    """Catches taps that stop firing, keys that change, an isinstance that fails."""
    model = made("Llama")
    state, layer = set(model.state_dict()), model.model.layers[0]
    kind = type(layer)
    fired = Counter[str]()
    for path, module in model.named_modules():
        module.register_forward_hook(lambda *_, path=path: fired.update([path]))
    replace(model)
    with torch.no_grad():
        model(IDS)
    called = {
        path
        for path, module in model.named_modules()
        if not isinstance(module, nn.ModuleList) and not path.endswith("act_fn")
    }
    assert {path for path, times in fired.items() if times == 1} == called
    assert set(model.state_dict()) == state
    assert isinstance(layer, kind)


def test_restore() -> None:
    model = made("Gemma2")
    with torch.no_grad():
        before = model(IDS).logits
        report = replace(model)
        with pytest.raises(ValueError, match="fused already"):
            replace(model)
        assert restore(model) == len(report.replaced)
        assert torch.equal(model(IDS).logits, before)
    assert not [m for m in model.modules() if type(m).__name__.startswith("Fused")]
    assert not [m for m in model.modules() if hasattr(m, "_fused_norm")]
    assert restore(model) == 0


def test_copies_are_fused_too() -> None:
    model = made("Qwen3")
    replace(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(twin(IDS).logits, model(IDS).logits)
    assert restore(twin) > 0


def test_positional_arguments_of_a_layer() -> None:
    """Catches a mask handed to attention as its position embeddings: the orders differ."""
    model = made("Llama")
    layer, x = model.model.layers[0], torch.randn(1, 4, 24)
    embeddings = model.model.rotary_emb(x, torch.arange(4)[None])
    mask = torch.zeros(1, 1, 4, 4)
    mask[..., 2] = -1e9
    with torch.no_grad():
        before = layer(x, mask, None, None, False, embeddings)
        replace(model)
        after = layer(x, mask, None, None, False, embeddings)
    torch.testing.assert_close(after, before)


class OddRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))


def test_what_is_not_replaced_has_a_reason() -> None:
    """Catches a silent gap: an unknown norm, an activation, layers of another kind."""
    model = made("Llama", hidden_act="relu")
    model.model.norm = OddRMSNorm()
    model.model.layers[1].post_attention_layernorm = nn.LayerNorm(24)
    report = replace(model)
    reasons = {skipped.path: skipped.reason for skipped in report.skipped}
    assert reasons == {
        "model.norm": "not a norm of the Llama, Qwen or Gemma kind",
        "model.layers.1.post_attention_layernorm": "not a norm of the Llama, Qwen or Gemma kind",
        "model.layers.0.mlp": "its activation is ReLU",
        "model.layers.1.mlp": "its activation is ReLU",
        "model.layers.1": "post_attention_layernorm wasn't replaced",
    }
    assert count(report) == (3, 0, 1)


def test_another_family_is_left_alone() -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    report = replace(model)
    assert report.replaced == []
    assert {s.kind for s in report.skipped} == {"LayerNorm", "GPT2MLP"}


def test_a_changed_forward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a later transformers whose class of the same name clamps: tried, then left alone."""
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    plain, whole = LlamaRMSNorm.forward, LlamaMLP.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: plain(self, x).clamp(-1, 1))
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: whole(self, x.clamp(-7, 7)))
    report = replace(made("Llama"))
    assert report.replaced == []
    reasons = Counter(s.reason for s in report.skipped)
    assert reasons["this version of it computes something else"] == 7
    assert reasons["post_attention_layernorm wasn't replaced"] == 2
