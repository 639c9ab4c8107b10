"""Canonical names on every architecture."""

from typing import Any

import pytest
import torch
from torch import nn

from quantwatch.domain import Scope
from quantwatch.errors import ModelError
from quantwatch.models.anatomy import resolve

# architecture: embedding, layer 1, its attention, its MLP, final norm, head, number of linears in it
_LLAMA = ("model.embed_tokens", "model.layers.1", "self_attn", "mlp", "model.norm", "lm_head", 7)
EXPECTED: dict[str, tuple[str, str, str, str | None, str | None, str, int]] = {
    "llama": _LLAMA,
    "llama-tied": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _LLAMA,
    "gemma3": _LLAMA,
    "cohere": _LLAMA,
    "granite": _LLAMA,
    "deepseek-v3": (*_LLAMA[:6], 9),
    "qwen2-moe": (*_LLAMA[:6], 9),
    "qwen3-moe": (*_LLAMA[:6], 5),
    "mixtral": (*_LLAMA[:6], 5),
    "phi": (*_LLAMA[:4], "model.final_layernorm", "lm_head", 6),
    "gpt2": (
        *("transformer.wte", "transformer.h.1", "attn", "mlp", "transformer.ln_f", "lm_head"),
        4,
    ),
    "bloom": (
        *("transformer.word_embeddings", "transformer.h.1", "self_attention", "mlp"),
        *("transformer.ln_f", "lm_head", 4),
    ),
    "gpt-neox": (
        *("gpt_neox.embed_in", "gpt_neox.layers.1", "attention", "mlp"),
        *("gpt_neox.final_layer_norm", "lm_head", 4),
    ),
    "opt": (
        *("model.decoder.embed_tokens", "model.decoder.layers.1", "self_attn", None),
        *("model.decoder.final_layer_norm", "lm_head", 6),
    ),
    "opt-350m": (
        *("model.decoder.embed_tokens", "model.decoder.layers.1", "self_attn", None, None),
        *("lm_head", 6),
    ),
    "own": ("tokens", "blocks.1", "attn", "ffn", "closing_norm", "unembed", 2),
}


def test_every_place_has_its_canonical_name(kit: Any, architecture: str) -> None:
    """Would catch a layernorm taken for attention, a position table for tokens, a lost norm."""
    embedding, layer, attention, mlp, norm, head, num_linears = EXPECTED[architecture]
    anatomy = resolve(kit.build(architecture))
    wanted = {
        "embedding": embedding,
        "layers.1": layer,
        "layers.1.attention": f"{layer}.{attention}",
        "layers.1.mlp": None if mlp is None else f"{layer}.{mlp}",
        "final_norm": norm,
        "head": head,
    }
    assert {scope: anatomy.taps.get(Scope(scope)) for scope in wanted} == wanted
    assert anatomy.num_layers == 3
    assert len([s for s in anatomy.linears if s.startswith("layers.1.")]) == num_linears
    for scope, path in wanted.items():
        assert (scope in anatomy.missing) == (path is None)
        if path is not None:
            assert anatomy.module_path(scope) == path
            assert anatomy.scopes_by_path[path] == scope


def test_taps_fire_in_the_order_they_are_listed(kit: Any, architecture: str) -> None:
    """Would catch an order that blames the layer before its own attention (birth map)."""
    model = kit.build(architecture)
    anatomy, fired = resolve(model), []
    for scope, path in anatomy.taps.items():
        model.get_submodule(path).register_forward_hook(lambda *_, s=scope: fired.append(s))
    with torch.no_grad():
        model(torch.randint(3, 64, (2, 7)))
    assert fired == list(anatomy.taps)


@pytest.mark.parametrize(
    ("family", "routers"),
    [
        ("llama", set()),
        ("mixtral", {f"layers.{n}.mlp.gate" for n in range(3)}),
        ("qwen3-moe", {f"layers.{n}.mlp.gate" for n in range(3)}),
        ("deepseek-v3", {f"layers.{n}.mlp.gate" for n in (1, 2)}),
        (
            "qwen2-moe",
            {f"layers.{n}.mlp.{g}" for n in range(3) for g in ("gate", "shared_expert_gate")},
        ),
    ],
)
def test_routers_are_named(kit: Any, family: str, routers: set[str]) -> None:
    """Would catch a router that a recipe quantizes, or a gated MLP's gate taken for one."""
    assert resolve(kit.build(family)).routers == routers


def _module(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def _layers(count: int = 2) -> nn.ModuleList:
    return nn.ModuleList(_module(attn=nn.Linear(8, 8)) for _ in range(count))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (_module(blocks=_layers(), head=nn.Linear(8, 16)), "no token embedding"),
        (_module(tokens=nn.Embedding(16, 8), head=nn.Linear(8, 16)), "no list of decoder layers"),
        (
            _module(tokens=nn.Embedding(16, 8), blocks=nn.ModuleList(), head=nn.Linear(8, 16)),
            "no list of decoder layers",
        ),
        (_module(tokens=nn.Embedding(16, 8), blocks=_layers()), "no head.* 16 outputs"),
    ],
    ids=["no embedding", "no layers", "empty layers", "no head"],
)
def test_what_cannot_be_found_is_named(module: nn.Module, words: str) -> None:
    """Would catch a guess where there is nothing to measure."""
    with pytest.raises(ModelError, match=words):
        resolve(module)


def test_unknown_scope_is_an_error_with_the_reason(kit: Any) -> None:
    """Would catch a silent None for a tap that the architecture lacks."""
    with pytest.raises(
        ModelError, match=r"layers\.1\.mlp.*no child module that looks like its mlp"
    ):
        resolve(kit.build("opt")).module_path("layers.1.mlp")
    with pytest.raises(ModelError, match=r"layers\.9.*no such tap"):
        resolve(kit.build("llama")).module_path("layers.9")


def test_experts_are_neither_layers_nor_measurable_alone() -> None:
    """Would catch a list of 8 experts that is longer than the list of layers."""
    blocks = nn.ModuleList(
        _module(
            attn=nn.Linear(8, 8),
            moe=_module(
                gate=nn.Linear(8, 4),
                experts=nn.ModuleList(_module(up=nn.Linear(8, 8)) for _ in range(4)),
            ),
        )
        for _ in range(2)
    )
    anatomy = resolve(_module(tokens=nn.Embedding(16, 8), blocks=blocks, head=nn.Linear(8, 16)))
    assert anatomy.num_layers == 2
    assert anatomy.routers == {"layers.0.mlp.gate", "layers.1.mlp.gate"}
    assert {s for s in anatomy.routed if s.startswith("layers.0")} == {
        f"layers.0.mlp.experts.{n}.up" for n in range(4)
    }
    assert "final_norm" in anatomy.missing


def test_a_gate_without_experts_is_no_router() -> None:
    """Would catch the gate of a gated MLP being left in full precision."""
    block = _module(attn=nn.Linear(8, 8), mlp=_module(gate=nn.Linear(8, 8), up=nn.Linear(8, 8)))
    anatomy = resolve(
        _module(tokens=nn.Embedding(16, 8), blocks=nn.ModuleList([block]), head=nn.Linear(8, 16))
    )
    assert "layers.0.mlp.gate" in anatomy.linears
    assert not anatomy.routers


def test_layers_may_be_a_sequential_and_a_shared_layer_counts_twice() -> None:
    """Would catch a repeated module being measured once (it is refused when it fires twice)."""
    shared = _module(attn=nn.Linear(8, 8))
    anatomy = resolve(
        _module(
            tokens=nn.Embedding(16, 8),
            blocks=nn.Sequential(shared, shared),
            head=nn.Linear(8, 16),
        )
    )
    assert [anatomy.taps[Scope(f"layers.{n}")] for n in (0, 1)] == ["blocks.0", "blocks.1"]


def test_packed_weights_count_as_linears() -> None:
    """Would catch quantized layers (buffers, no `weight`) dropping out of the comparison."""
    packed = _module()
    packed.register_buffer("codes", torch.zeros(8, 4, dtype=torch.uint8))
    block = _module(attn=_module(q=packed, norm=nn.LayerNorm(8)))
    anatomy = resolve(
        _module(tokens=nn.Embedding(16, 8), blocks=nn.ModuleList([block]), head=nn.Linear(8, 16))
    )
    assert anatomy.linears == {"layers.0.attention.q": "blocks.0.attn.q"}
