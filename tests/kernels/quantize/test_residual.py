"""What stays high: the residual stream's dtype, norm statistics, router logits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantwatch_kernels.formats import INT8
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.high_precision import keep_statistics_high_
from quantwatch_kernels.quantize.recipe import PerChannel, Recipe, WeightSpec
from quantwatch_kernels.quantize.residual import residual_overflows, round_residual_
from quantwatch_kernels.quantize.routers import unrouted_experts

IDS = torch.arange(1, 41).view(2, 20)
INNER_ROUTERS = {
    "hunyuan": ["mlp.gate.wg"],
    "jetmoe": ["mlp.router.layer", "self_attention.experts.router.layer"],
}
HALVES = [torch.float16, torch.bfloat16]


def layer_outputs(model: Any) -> list[Tensor]:
    """Return what leaves each layer, as a hook sees it."""
    seen: list[Tensor] = []
    handles = [
        layer.register_forward_hook(
            lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(IDS, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("dtype", HALVES)
def test_a_narrow_stream_is_rounded_and_widened_again(dtype: torch.dtype, decoder: Any) -> None:
    model = decoder("llama")
    before = layer_outputs(model)
    notes = round_residual_(model, (("0", dtype),))
    after = layer_outputs(model)
    assert notes == [("model.layers.0", f"its output is rounded to {str(dtype)[6:]}")]
    assert after[0].dtype == torch.float32
    assert torch.equal(after[0], before[0].to(dtype).float())
    assert not torch.equal(after[1], after[1].to(dtype).float())
    assert residual_overflows(model) == {}


def test_globs_and_scopes(decoder: Any) -> None:
    model = decoder("llama")
    scopes = {f"model.layers.{n}": f"layers.{n}" for n in range(2)}
    notes = round_residual_(model, (("layers.1", torch.float16), ("*", torch.bfloat16)), scopes)
    assert [note.rpartition(" ")[2] for _, note in notes] == ["bfloat16", "float16"]
    for bad, why in (
        (("7", torch.float16), "matches none"),
        (("*", torch.int8), "it is torch.int8"),
    ):
        with pytest.raises(ValueError, match=why):
            round_residual_(decoder("llama"), (bad,))


def test_overflow_is_counted_and_stays(decoder: Any) -> None:
    """Catches a saturated or silently infinite stream beyond 65504 (kernel_anchors 2.1, 8)."""
    model = decoder("llama")
    model.model.layers[0].mlp.down_proj.weight[7] *= 1e7
    round_residual_(model, (("*", torch.float16),))
    outputs = layer_outputs(model)
    count = int(torch.isinf(outputs[0]).sum())
    assert count > 0
    assert residual_overflows(model)["model.layers.0"] == count
    model = decoder("llama")
    round_residual_(model, (("*", torch.bfloat16),))
    model.model.layers[0].mlp.down_proj.weight[7] *= 1e7
    assert torch.isfinite(layer_outputs(model)[0]).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_wide_stream_in_a_narrow_model(dtype: torch.dtype, decoder: Any) -> None:
    """Catches a float32 stream that is only a cast of 16-bit sums, and linears fed with float32."""
    exact = decoder("llama")
    model = decoder("llama").to(dtype)
    exact.load_state_dict(model.state_dict())
    plain = layer_outputs(model)
    round_residual_(model, (("*", torch.float32),))
    wide = layer_outputs(model)
    for out in wide:
        assert out.dtype == torch.float32
        assert not torch.equal(out, out.to(dtype).float())
    with torch.no_grad():
        assert model(IDS).logits.dtype == dtype
    truth = layer_outputs(exact)
    errors = [float((outs[-1].double() - truth[-1]).norm()) for outs in (wide, plain)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("stream", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("execution", ["dequantized", "reference", "aten"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "llama"])
def test_packed_layers_compute_in_the_dtype_they_had(
    family: str, execution: Any, stream: torch.dtype, decoder: Any
) -> None:
    """Catches the float32 of a router, or of norms, taken for that of the packed matrices."""
    model = decoder(family).to(torch.bfloat16)
    if family == "llama":
        for layer in model.model.layers:
            layer.input_layernorm, layer.post_attention_layernorm = Rounds(48), Rounds(48)
    recipe = Recipe(WeightSpec(INT8, PerChannel()), residual_dtype=(("*", stream),))
    seen: list[torch.dtype] = []
    quantize_(model, recipe, execution=execution)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    outputs = layer_outputs(model)
    assert seen == [torch.bfloat16] * 2
    assert outputs[-1].isfinite().all()
    assert outputs[-1].dtype == (torch.float32 if stream == torch.float32 else torch.bfloat16)


class Hands(nn.Module):
    """A decoder layer that hands its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 3)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.clone()


class Stack(nn.Module):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=2)
        self.layers = nn.ModuleList([Hands(), Hands()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_becomes_infinite_on_the_way_back_or_in_is_counted() -> None:
    """Catches a count of infinite stream values that misses those of the cast to float16."""
    high = torch.tensor([65504.0, 65472.0, 60000.0])
    model = Stack().half()
    round_residual_(model, (("0", torch.bfloat16),))
    assert model(high.half()).isinf().tolist() == [True, True, False]
    assert residual_overflows(model) == {"layers.0": 2}
    model = Stack().half()
    round_residual_(model, (("0", torch.float32),))
    assert model(2 * high).isinf().all()
    assert residual_overflows(model) == {"layers.1": 3}


def test_a_wide_stream_ends_where_it_is_told_to(decoder: Any) -> None:
    """Catches a float32 stream that leaks out of layers nobody named."""
    model = decoder("llama").to(torch.bfloat16)
    notes = round_residual_(model, (("0", torch.float32),))
    assert [out.dtype for out in layer_outputs(model)] == [torch.float32, torch.bfloat16]
    assert len(notes) == 1


def test_a_hook_and_a_replay_see_the_same(decoder: Any) -> None:
    """Catches rounding by a hook, which a replay of `forward` passes by."""
    model = decoder("llama")
    round_residual_(model, (("*", torch.float16),))
    calls: list[Any] = []
    model.model.layers[0].register_forward_hook(
        lambda m, args, kwargs, out: calls.append((m, args, kwargs, out)), with_kwargs=True
    )
    with torch.no_grad():
        model(IDS, use_cache=False)
    ((module, args, kwargs, out),) = calls
    assert torch.equal(module.forward(*args, **kwargs), out)


class NaiveNorm(nn.Module):
    """Statistics in the input's dtype: x² overflows in float16 above 255."""

    def __init__(self, width: int, centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width), requires_grad=False)
        self.eps = 1e-6
        self.centred = centred

    def forward(self, x: Tensor) -> Tensor:
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_norm_statistics_of_300_in_float16(centred: bool, decoder: Any) -> None:
    """Catches x² = 90000 = Inf, which makes the norm's output 0 (kernel_anchors 2.1, 6)."""
    model = decoder("llama")
    model.model.layers[0].input_layernorm = NaiveNorm(48, centred)
    model.half()
    norm = model.model.layers[0].input_layernorm
    x = torch.full((1, 48), 300.0, dtype=torch.float16)
    x[:, ::2] = -280
    assert norm(x).eq(0).all()
    notes = dict(keep_statistics_high_(model))
    assert set(notes) == {"model.layers.0.input_layernorm"}
    assert "float32" in notes["model.layers.0.input_layernorm"]
    centre = x.double() - (x.double().mean() if centred else 0)
    expected = centre / centre.square().mean().sqrt() * norm.weight.double()
    assert norm(x).dtype == torch.float16
    assert ((norm(x).double() - expected).abs() <= 2**-10 * expected.abs()).all()


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("seed", range(5))
def test_norm_statistics_in_bfloat16(seed: int, centred: bool, decoder: Any) -> None:
    """Catches a mean square of 8 bits, whose error hides below that of two roundings."""
    model = decoder("llama")
    norm = NaiveNorm(48, centred)
    norm.weight.copy_(0.5 + torch.rand(48, generator=torch.Generator().manual_seed(seed)))
    model.model.layers[0].input_layernorm = norm
    model.to(torch.bfloat16)
    assert set(dict(keep_statistics_high_(model))) == {"model.layers.0.input_layernorm"}
    x = (3 * torch.randn(64, 48)).to(torch.bfloat16)
    centre = x.double() - (x.double().mean(-1, keepdim=True) if centred else 0)
    expected = centre / centre.square().mean(-1, keepdim=True).sqrt() * norm.weight.double()
    assert ((norm(x).double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all()


class Rounds(NaiveNorm):
    """Float32 statistics, and roundings where norms have them."""

    value = gain = False
    offset = 0.0

    def forward(self, x: Tensor) -> Tensor:
        unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        unit = unit.to(x.dtype).float() if self.value else unit
        weight = self.weight.float() + self.offset
        weight = weight.to(x.dtype).float() if self.gain else weight
        return (unit * weight).to(x.dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_may_round_value_gain_and_product(
    dtype: torch.dtype, value: bool, gain: bool, offset: float, decoder: Any
) -> None:
    """Catches a float32 norm that is called wrong for where it rounds."""
    model = decoder("llama")
    norm = model.model.layers[0].input_layernorm = Rounds(48)
    norm.value, norm.gain, norm.offset = value, gain, offset
    assert keep_statistics_high_(model.to(dtype)) == []


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "qwen2", "olmo2", "gemma2", "phi3"])
@pytest.mark.parametrize("dtype", HALVES)
def test_norms_of_transformers_are_right(family: str, dtype: torch.dtype, decoder: Any) -> None:
    """They compute in float32 already: nothing is changed, nothing is reported."""
    assert keep_statistics_high_(decoder(family).to(dtype)) == []


def test_a_norm_that_is_lost_and_not_understood(decoder: Any) -> None:
    class Odd(NaiveNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 3

    model = decoder("llama")
    model.model.layers[1].input_layernorm = Odd(48)
    model.half()
    with pytest.raises(ValueError, match=r"layers\.1\.input_layernorm: Odd loses its statistics"):
        keep_statistics_high_(model)


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe"])
def test_router_ties(family: str, decoder: Any) -> None:
    """Catches logits in bfloat16 that tie where the float64 ones differ (bug log 45)."""
    model = decoder(family).to(torch.bfloat16)
    router = model.model.layers[0].mlp.gate
    direction = torch.randn(48).to(torch.bfloat16)
    gain = torch.tensor([1.0, 1.0, 0.5, 0.25])
    router.weight.copy_(gain[:, None] * direction)
    # Expert 1 is ahead of expert 0 by less than bfloat16 resolves in a sum of this size.
    router.weight[1, 0] = direction[0] * (1 + 2**-7)
    x = (direction.float().abs().add(0.5) * direction.sign()).to(torch.bfloat16)[None]
    x[0, 0] = direction[0].sign()
    exact = x.double() @ router.weight.double().T
    assert exact[0, 1] > exact[0, 0]
    tied = router(x)[0]
    assert tied[0, 0] == tied[0, 1]
    notes = dict(keep_statistics_high_(model))
    assert (
        "router logits are float32; the module made them in bfloat16"
        in notes["model.layers.0.mlp.gate"]
    )
    logits, scores, indices = router(x)
    assert logits.dtype == torch.float32
    assert logits[0, 1] > logits[0, 0]
    assert indices[0, 0] == 1
    assert scores.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.isfinite(model(IDS).logits).all()


def test_a_router_that_returns_its_logits_last(decoder: Any) -> None:
    """Catches Llama 4's scores in float32, which its experts in 16 bits can't multiply by."""
    model = decoder("llama4").to(torch.bfloat16)
    assert "model.layers.0.feed_forward.router" in dict(keep_statistics_high_(model))
    scores, logits = model.model.layers[0].feed_forward.router(torch.randn(3, 48).bfloat16())
    assert (scores.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    with torch.no_grad():
        assert torch.isfinite(model(IDS).logits).all()


def test_equal_router_logits_are_decided_alike(decoder: Any) -> None:
    """Exact ties are decided the same way in every row (bug log 45)."""
    model = decoder("mixtral").to(torch.bfloat16)
    keep_statistics_high_(model)
    router = model.model.layers[0].mlp.gate
    router.weight.copy_(torch.ones(4, 48))
    _, _, indices = router(torch.ones(3, 48, dtype=torch.bfloat16))
    assert all(row == indices[0].tolist() for row in indices.tolist())


@pytest.mark.parametrize("family", INNER_ROUTERS)
def test_routers_one_level_down(family: str, decoder: Any) -> None:
    """Catches a router's inner linear layer that stays in 16 bits (bug log 45)."""
    model = decoder(family).to(torch.bfloat16)
    plain = model(IDS).logits
    notes = dict(keep_statistics_high_(model))
    for place in INNER_ROUTERS[family]:
        path = f"model.layers.0.{place}"
        router = model.get_submodule(path)
        assert "router logits are float32" in notes[path]
        x = torch.randn(3, 48).to(torch.bfloat16)
        exact = x.double() @ router.weight.double().T
        assert ((router(x) - exact).abs() <= 1e-5 * exact.abs().max()).all()
    with torch.no_grad():
        kept = model(IDS).logits
    assert kept.dtype == torch.bfloat16
    assert (kept - plain).float().norm() < 0.5 * plain.float().norm()


@pytest.mark.parametrize("family", INNER_ROUTERS)
def test_experts_without_a_known_router_are_reported(family: str, decoder: Any) -> None:
    """Catches a mixture whose router has another name, and is quantized without a word."""
    model = decoder(family)
    assert unrouted_experts(model) == []
    block = model.model.layers[0].mlp
    name = "router" if family == "jetmoe" else "gate"
    block.chooser = block._modules.pop(name)
    stacks = ["input_linear", "output_linear"] if family == "jetmoe" else ["experts"]
    expected = [(f"model.layers.0.mlp.{stack}", NO_ROUTER) for stack in stacks]
    assert keep_statistics_high_(model) == expected


NO_ROUTER = "no router was found beside these experts"


class DeepRouter(nn.Module):
    """Two matrices, between which the model's dtype has to stay what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(4, 3)


def test_a_router_of_several_matrices_is_reported() -> None:
    """Catches float32 logits promised for a router of which only a part would be float32."""
    model = nn.ModuleDict(
        {"router": DeepRouter(), "experts": nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])}
    ).to(torch.bfloat16)
    why = "a router of 2 matrices: its logits stay in the model's dtype"
    assert keep_statistics_high_(model) == [("router", why)]


def test_float32_models_are_left_alone(decoder: Any) -> None:
    assert keep_statistics_high_(decoder("mixtral")) == []
