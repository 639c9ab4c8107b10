"""What stays high: the residual stream's dtype, norm statistics, router logits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.high_precision import keep_statistics_high_
from quantwatch_kernels.quantize.residual import residual_overflows, round_residual_

IDS = torch.arange(1, 41).view(2, 20)
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


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "qwen2"])
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


def test_equal_router_logits_are_decided_alike(decoder: Any) -> None:
    """Exact ties are decided the same way in every row (bug log 45)."""
    model = decoder("mixtral").to(torch.bfloat16)
    keep_statistics_high_(model)
    router = model.model.layers[0].mlp.gate
    router.weight.copy_(torch.ones(4, 48))
    _, _, indices = router(torch.ones(3, 48, dtype=torch.bfloat16))
    assert all(row == indices[0].tolist() for row in indices.tolist())


def test_float32_models_are_left_alone(decoder: Any) -> None:
    assert keep_statistics_high_(decoder("mixtral")) == []
