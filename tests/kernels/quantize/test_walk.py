"""A walk is the model: bit for bit, on every architecture, and it leaves the model as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.quantize import moe_families
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2MoeConfig,
)

from quantwatch_kernels.quantize.walk import LayerWalk

SIZE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GATED = {**SIZE, "intermediate_size": 48, "num_key_value_heads": 2}
GEMMA = {**GATED, "head_dim": 8, "sliding_window": 4}
EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 32}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**GATED),
    "llama-tied": lambda: LlamaConfig(**GATED, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=3, n_head=4),
    "qwen2-moe": lambda: Qwen2MoeConfig(**GATED, **EXPERTS, num_experts=4),
    "mixtral": lambda: MixtralConfig(**GATED, num_local_experts=4),
    "gemma2": lambda: Gemma2Config(**GEMMA),
    "gemma3": lambda: Gemma3TextConfig(
        **GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "opt": lambda: OPTConfig(**SIZE, ffn_dim=48, word_embed_proj_dim=16),
    "neox": lambda: GPTNeoXConfig(**SIZE, intermediate_size=48),
    "bloom": lambda: BloomConfig(vocab_size=96, hidden_size=32, n_layer=3, n_head=4),
    "falcon": lambda: FalconConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=3, num_attention_heads=4
    ),
    "phi3": lambda: Phi3Config(**GATED, pad_token_id=0),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


EACH = [
    pytest.param(name, marks=[pytest.mark.slow] if family.slow else [])
    for name, family in moe_families.FAMILIES.items()
]


def token_ids() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 9), (1, 17), (3, 1))
    return [torch.randint(1, 96, shape, generator=generator) for shape in shapes]


def plain(model: Any, inputs: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [model(ids, use_cache=False).logits for ids in inputs]


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_forward_pass_bit_for_bit(name: str) -> None:
    """Catches a mask, position or scale that only the first layer gets, and a stub left behind."""
    model, inputs = build(name), token_ids()
    expected = plain(model, inputs)
    walk = LayerWalk(model, inputs)
    for index in range(len(walk.layers)):
        walk.run(index)
    assert len(walk.layers) == 3
    for actual, wanted in zip(walk.finish(walk.hidden), expected, strict=True):
        assert torch.equal(actual, wanted)
    for actual, wanted in zip(plain(model, inputs), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("family", EACH)
def test_experts_too(family: str) -> None:
    """Catches what a layer hands on beside hidden states, a router's state, and is left behind."""
    model = moe_families.build(family)
    inputs = [ids.clamp(3, 90) for ids in token_ids()]
    expected = plain(model, inputs)
    walk = LayerWalk(model, inputs)
    for index in range(len(walk.layers)):
        walk.run(index)
    for actual, wanted in zip(walk.finish(walk.hidden), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_change_in_a_layer_shows(name: str) -> None:
    """Catches a walk that reuses what a layer gave before it was changed."""
    model, inputs = build(name), token_ids()
    walk = LayerWalk(model, inputs)
    walk.run(0)
    with torch.no_grad():
        model.get_submodule(walk.layers[1][0]).mlp.down_proj.weight.mul_(3)
    walk.run(1)
    walk.run(2)
    for actual, wanted in zip(walk.finish(walk.hidden), plain(model, inputs), strict=True):
        assert torch.equal(actual, wanted)


def test_forwards_and_call_change_nothing() -> None:
    """Catches a look at a layer that moves the walk on."""
    walk = LayerWalk(build("llama"), token_ids())
    before = [h.clone() for h in walk.hidden]
    seen: list[int] = []
    hook = walk.layers[0][1].register_forward_hook(lambda *_: seen.append(1))
    for forward in walk.forwards(0):
        forward()
    hook.remove()
    assert len(seen) == 3
    assert all(torch.equal(a, b) for a, b in zip(walk.hidden, before, strict=True))
    called = [walk.call(0, number, h) for number, h in enumerate(before)]
    assert called[0].requires_grad
    assert all(torch.equal(a, b) for a, b in zip(walk.run(0), called, strict=True))


def test_layers_run_in_turn() -> None:
    """Catches hidden states of one layer fed to another."""
    walk = LayerWalk(build("llama"), token_ids())
    with pytest.raises(ValueError, match="layer 1 can't run"):
        walk.run(1)
    walk.run(0)
    with pytest.raises(ValueError, match="layer 0 can't run"):
        walk.run(0)


class Between(nn.Module):
    """Two layers, and 1 is added between them."""

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(**{**GATED, "num_hidden_layers": 2})
        self.embed = nn.Embedding(96, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids: Tensor, *, use_cache: bool) -> Tensor:
        first: Tensor = self.layers[0](self.embed(ids))
        second: Tensor = self.layers[1](first + 1)
        return second


def test_hooks_of_layers_are_run_once() -> None:
    """Catches a hook that sees a stub, and changes or reads what no layer is given."""
    model, seen = build("llama"), []
    model.model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    model.model.layers[2].register_forward_hook(lambda *_: seen.append(1))
    inputs = token_ids()
    expected = plain(model, inputs)
    seen.clear()
    walk = LayerWalk(model, inputs)
    for index in range(3):
        walk.run(index)
    for actual, wanted in zip(walk.finish(walk.hidden), expected, strict=True):
        assert torch.equal(actual, wanted)
    assert len(seen) == len(inputs)
    assert len(model.model.layers[1]._forward_pre_hooks) == 1


def test_models_that_cannot_be_walked() -> None:
    """Catches a walk that is silently another model."""
    with pytest.raises(ValueError, match=r"changes hidden states before layers\.1"):
        LayerWalk(Between().eval(), token_ids())
    with pytest.raises(ValueError, match="num_hidden_layers"):
        LayerWalk(nn.Linear(3, 3).eval(), token_ids())
    shared = build("llama")
    shared.model.layers[1] = shared.model.layers[0]
    with pytest.raises(ValueError, match="lists a layer twice"):
        LayerWalk(shared, token_ids())
    shorter = build("llama")
    del shorter.model.layers[0]
    with pytest.raises(ValueError, match="exactly one list of 3 decoder layers; it has none"):
        LayerWalk(shorter, token_ids())
    with pytest.raises(ValueError, match="evaluation mode"):
        LayerWalk(build("llama").train(), token_ids())


BAD = {
    "nothing": ([], "at least one input"),
    "floats": ([torch.rand(2, 3)], "must be token ids"),
    "one-dimensional": ([torch.arange(3)], "must be token ids"),
    "empty": ([torch.zeros(2, 0, dtype=torch.long)], "at least one"),
    "out of the vocabulary": ([torch.tensor([[5, 96]])], r"0 … 95"),
    "negative": ([torch.tensor([[5, -100]])], r"-100 … 5"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_inputs(name: str) -> None:
    """Catches padding labels and activations passed as token ids."""
    inputs, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        LayerWalk(build("llama"), inputs)
