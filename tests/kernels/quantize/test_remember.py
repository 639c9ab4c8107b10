"""What calibration remembers of finished layers saves multiplications and changes no bit."""

import copy
from typing import Any

import pytest
import torch
from tests.kernels.quantize.moe_families import FAMILIES, build
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from quantwatch_kernels.quantize import remember
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.recipe import Recipe

GPTQ = Recipe.named("uint4-g32").with_weights(method="gptq")
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
EACH = [pytest.param(n, marks=[pytest.mark.slow] if f.slow else []) for n, f in FAMILIES.items()]


def token_ids(count: int) -> list[Tensor]:
    """Different lengths, the first so short that it reaches few experts."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 90, (1, 2 + 6 * n), generator=generator) for n in range(count)]


def both_ways(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Return the model quantized with a memory and without one."""
    found = []
    for limit in (remember.LIMIT_BYTES, 0):
        monkeypatch.setattr(remember, "LIMIT_BYTES", limit)
        found.append(copy.deepcopy(model))
        quantize_(found[-1], GPTQ, calibration=token_ids(4))
    return found


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    assert one.state_dict().keys() == expected.keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, expected[name]), name
    for module in one.modules():
        assert "forward" not in module.__dict__


@pytest.mark.parametrize("family", EACH)
def test_experts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches outputs kept before all that they depend on is final: experts come as they like."""
    assert_equal(*both_ways(build(family), monkeypatch))


def llama() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    return AutoModelForCausalLM.from_config(config).eval()


class InPlace(nn.Module):
    """A linear layer whose reader writes into its output."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result.mul_(3).clamp_(-1, 1)


class Twice(nn.Module):
    """down(up(x) + up(down(up(x)))): the second input of `up` and `down` comes from both."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.up_proj, self.down_proj = mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        first = self.up_proj(x)
        result: Tensor = self.down_proj(first + self.up_proj(self.down_proj(first)))
        return result


class NowAndThen(nn.Module):
    """An MLP that takes its up projection for long inputs only, before the others."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        extra = self.up_proj(x) if x.shape[1] > 5 else 0
        result: Tensor = self.down_proj(self.gate_proj(x) + extra)
        return result


def with_mlp(kind: type[nn.Module]) -> Any:
    model = llama()
    for layer in model.model.layers:
        layer.mlp = kind(layer.mlp)
    return model


def in_place() -> Any:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.up_proj = InPlace(layer.mlp.up_proj)
    return model


DENSE = {
    "llama": llama,
    "gpt2": gpt2,
    "output written in place": in_place,
    "called twice": lambda: with_mlp(Twice),
    "not called at first": lambda: with_mlp(NowAndThen),
}


@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE.keys())
def test_dense(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a copy that a model has written into, and a second call answered with the first."""
    assert_equal(*both_ways(make(), monkeypatch))


PASSES = {"q_proj": 4, "k_proj": 4, "v_proj": 4, "o_proj": 3, "gate_proj": 2, "up_proj": 2}
"""In how many passes after its own a matrix is needed; `down_proj` in one."""


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
def test_what_is_saved(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a memory that nobody asks: each input is multiplied with each matrix once."""
    monkeypatch.setattr(remember, "LIMIT_BYTES", 2**30 if kept else 0)
    model, inputs, done = llama(), token_ids(4), []
    linear = torch.nn.functional.linear

    def counting(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        done.append(x.shape[:-1].numel() * weight.numel())
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", counting)
    quantize_(model, GPTQ, calibration=inputs)
    sizes = {
        name: module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    passes = {name: 1 if kept else PASSES.get(name.split(".")[-1], 1) for name in sizes}
    expected = sum(ids.numel() for ids in inputs) * sum(sizes[n] * passes[n] for n in sizes)
    # On the first input: once more to see who reads what, and its first layer to see what it returns.
    again = [size for name, size in sizes.items() if ".0." in name] + list(sizes.values())
    assert sum(done) == expected + inputs[0].numel() * sum(again)


def test_the_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a limit per layer that is one per module, and one that changes what is found."""
    plain, some = llama(), llama()
    quantize_(plain, GPTQ, calibration=token_ids(4))
    monkeypatch.setattr(remember, "LIMIT_BYTES", 3000)
    held = []
    clone = Tensor.clone

    def watched(self: Tensor) -> Tensor:
        held.append(self.nbytes)
        return clone(self)

    monkeypatch.setattr(Tensor, "clone", watched)
    quantize_(some, GPTQ, calibration=token_ids(4))
    monkeypatch.undo()
    assert held
    assert_equal(some, plain)
