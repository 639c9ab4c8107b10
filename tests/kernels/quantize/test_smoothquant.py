"""Smoothing changes activations and weights, and nothing that comes out."""

from typing import Any

import pytest
import torch
from tests.kernels.quantize.outputs import logits, moved
from torch import nn

from quantwatch_kernels.quantize.smoothquant import smooth_, smoothing_factors

FAMILIES = ["llama", "llama-tied", "qwen2", "gemma", "phi3", "mixtral", "qwen2-moe", "gpt2"]


def test_factors() -> None:
    """Catches α on the wrong side, and 0/0 or ∞ in channels that are always zero (bug log 5)."""
    activation, weight = torch.tensor([4.0, 9.0, 0.0, 2.0]), torch.tensor([1.0, 4.0, 3.0, 0.0])
    assert smoothing_factors(activation, weight, 0.5).tolist() == [2.0, 1.5, 1.0, 1.0]
    assert smoothing_factors(activation, weight, 1.0).tolist() == [4.0, 9.0, 1.0, 1.0]
    assert smoothing_factors(activation, weight, 0.0)[1].item() == 0.25
    with pytest.raises(ValueError, match="activations of a channel to smooth aren't finite"):
        smoothing_factors(torch.tensor([torch.inf]), torch.ones(1), 0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_function_stays(family: str, decoder: Any, calibration: Any) -> None:
    """Catches a consumer that isn't rescaled: experts, routers, the shared expert's gate, o of
    grouped heads, biases of v and of LayerNorm, gains of 1 + w (bug log 40)."""
    model = decoder(family)
    ids = torch.arange(40).view(2, 20)
    before = logits(model, ids)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    report = smooth_(model, 0.7, calibration)
    assert moved(logits(model, ids), before) < 1e-5
    assert report.logits_moved < 1e-5
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, weights[name])]
    assert sum("norm" in n or "ln_" in n for n in changed) >= 4
    assert not any("embed" in n or "lm_head" in n or "wte" in n for n in changed)
    if family in ("mixtral", "qwen2-moe"):
        assert any("experts.gate_up_proj" in n for n in changed)
        assert any("mlp.gate.weight" in n for n in changed)


def test_ranges_meet_in_the_middle(decoder: Any, calibration: Any) -> None:
    """With α = ½ activations and weights end with equal largest magnitudes √(a·w), per channel."""
    model = decoder("llama")
    layer = model.model.layers[0]
    inputs: list[torch.Tensor] = []
    layer.input_layernorm.register_forward_hook(lambda _m, _a, out: inputs.append(out))

    def largest() -> torch.Tensor:
        inputs.clear()
        for ids in calibration:
            logits(model, ids)
        return torch.cat([x.flatten(0, 1) for x in inputs]).abs().amax(0).double()

    plain = [getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"]
    middle = (largest() * torch.cat(plain).abs().amax(0).double()).sqrt()
    smooth_(model, 0.5, calibration)
    activation = largest()
    torch.testing.assert_close(activation, middle, rtol=1e-4, atol=0)
    attention = layer.self_attn
    readers = [attention.q_proj, attention.k_proj, attention.v_proj]
    weight = torch.cat([reader.weight for reader in readers]).abs().amax(0)
    # v's rows are divided afterwards by the place v → o, so only q and k are still as they were.
    assert (activation >= 0.999 * torch.cat([r.weight for r in readers[:2]]).abs().amax(0)).all()
    assert ((activation / weight - 1).abs() < 1e-3).float().mean() > 0.3


def test_an_outlier_channel_shrinks(decoder: Any, calibration: Any) -> None:
    model = decoder("llama")
    norm = model.model.layers[1].post_attention_layernorm
    norm.weight[5] = 200.0
    inputs: list[torch.Tensor] = []
    handle = norm.register_forward_hook(lambda _m, _a, out: inputs.append(out))
    logits(model, calibration[0])
    smooth_(model, 0.5, calibration)
    logits(model, calibration[0])
    handle.remove()
    ratio = [
        float(x[..., 5].abs().max() / x.abs().flatten(0, 1).amax(0).median())
        for x in (inputs[0], inputs[-1])
    ]
    assert ratio[1] < ratio[0] ** 0.5 * 2 < ratio[0]


def test_what_is_not_smoothed_is_told(decoder: Any, calibration: Any) -> None:
    report = smooth_(decoder("qwen2-moe"), 0.5, calibration)
    skipped = dict(report.skipped)
    assert "no single gated up" in skipped["model.layers.0.mlp.experts.down_proj"]
    assert "no single gated up" in skipped["model.layers.1.mlp.shared_expert.down_proj"]
    assert (
        "model.layers.0.mlp.up_proj → down_proj"
        in smooth_(decoder("llama"), 0.5, calibration).smoothed
    )


def test_a_reader_nobody_knows_is_noticed(decoder: Any, calibration: Any) -> None:
    """Catches a forward that reads the norm where no name says so: equivalence is measured."""
    model = decoder("llama")
    layer = model.model.layers[0]
    inner = layer.mlp.forward
    layer.mlp.forward = lambda x: inner(x) + x
    with pytest.raises(ValueError, match="smoothing changed what LlamaForCausalLM computes"):
        smooth_(model, 0.5, calibration)


@pytest.mark.parametrize(
    ("family", "why"), [("olmo2", "smoothing changed"), ("gemma2", "two norms")]
)
def test_other_architectures_are_refused(
    family: str, why: str, decoder: Any, calibration: Any
) -> None:
    with pytest.raises(ValueError, match=why):
        smooth_(decoder(family), 0.5, calibration)


def test_bad_calibration(decoder: Any) -> None:
    with pytest.raises(ValueError, match="at least one input"):
        smooth_(decoder("llama"), 0.5, [])
    model = decoder("llama")
    model.model.layers[1].input_layernorm.weight.fill_(torch.inf)
    with pytest.raises(ValueError, match=r"layers\.1"):
        smooth_(model, 0.5, [torch.arange(8)[None]])


def test_a_norm_that_does_something_else(decoder: Any, calibration: Any) -> None:
    class Cube(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(48), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight**3

    model = decoder("llama")
    model.model.layers[0].input_layernorm = Cube()
    report = smooth_(model, 0.5, calibration)
    assert (
        "what Cube does with its gain is not known"
        in dict(report.skipped)["model.layers.0.input_layernorm"]
    )
