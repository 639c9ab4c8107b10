"""Rotations change the basis and nothing that comes out."""

from typing import Any

import pytest
import torch
from tests.kernels.quantize.outputs import logits, moved

from quantwatch_kernels.quantize.api import model_size
from quantwatch_kernels.quantize.basis import residual_rotation
from quantwatch_kernels.quantize.blocks import norm_gain
from quantwatch_kernels.quantize.interpose import transformed_input
from quantwatch_kernels.quantize.recipe import RotationSpec
from quantwatch_kernels.quantize.rotation import rotate_
from quantwatch_kernels.quantize.smoothquant import smooth_

SPECS = {
    "R1": RotationSpec(True, False, False),
    "R2": RotationSpec(False, True, False),
    "R4": RotationSpec(False, False, True),
    "all": RotationSpec(True, True, True, seed=7),
    "blocks": RotationSpec(True, True, True, block=16),
}


@pytest.mark.parametrize(
    "family", ["llama", "llama-tied", "qwen2", "gemma", "mixtral", "qwen2-moe"]
)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_function_stays(family: str, spec: RotationSpec, decoder: Any) -> None:
    """Catches gains that don't commute, a tied head in two bases, heads of a group rotated apart,
    biases left behind (Qwen2's v), experts and routers forgotten, an inverse for a rotation."""
    model = decoder(family)
    before = logits(model)
    report = rotate_(model, spec)
    assert moved(logits(model), before) < 1e-5
    assert report.logits_moved < 1e-5


def test_fused_projections(decoder: Any) -> None:
    model = decoder("phi3")
    before = logits(model)
    rotate_(model, RotationSpec(True, False, True))
    assert moved(logits(model), before) < 1e-5
    with pytest.raises(ValueError, match=r"model\.layers\.0: its heads' values have no v_proj"):
        rotate_(decoder("phi3"), RotationSpec(False, True, False))


def spread(x: torch.Tensor) -> float:
    """Largest over root mean square, of the worst token."""
    return float((x.abs().amax(-1) / x.square().mean(-1).sqrt()).max())


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_outliers_are_gone_where_they_were(family: str, decoder: Any) -> None:
    """Catches a rotation that is the identity, or one of the weights alone."""
    model = decoder(family)
    model.model.embed_tokens.weight[:, 3] *= 60
    model.model.layers[0].mlp.up_proj.weight[5] *= 300
    layer = model.model.layers[0]
    seen: dict[str, torch.Tensor] = {}
    layer.self_attn.q_proj.register_forward_pre_hook(
        lambda m, a: seen.__setitem__("q", transformed_input(m, a[0]))
    )
    layer.mlp.down_proj.register_forward_pre_hook(
        lambda m, a: seen.__setitem__("down", transformed_input(m, a[0]))
    )
    logits(model)
    before = {name: spread(x) for name, x in seen.items()}
    rotate_(model, SPECS["all"])
    logits(model)
    for name, x in seen.items():
        assert spread(x) < 0.75 * before[name], name


def test_gains_are_folded(decoder: Any) -> None:
    for family in ("llama", "gemma"):
        model = decoder(family)
        rotate_(model, SPECS["R1"])
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                gain = norm_gain(norm)
                assert gain is not None
                assert (norm.weight + gain.offset).eq(1).all()


def test_a_tied_pair_stays_one_matrix(decoder: Any) -> None:
    """Catches a tie that is broken silently: 21 % more bytes on SmolLM2 (bug log 19)."""
    model = decoder("llama-tied")
    size, _ = model_size(model)
    table = model.lm_head.weight.clone()
    notes = dict(rotate_(model, SPECS["R1"]).notes)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, table)
    assert "rotated back online" in notes["head"]
    assert model_size(model)[0] - size < 2048  # signs and factors of one rotation, int8
    untied = decoder("llama")
    assert "folded into it" in dict(rotate_(untied, SPECS["R1"]).notes)["head"]


def test_what_is_not_rotated_is_told(decoder: Any) -> None:
    notes = dict(rotate_(decoder("mixtral"), SPECS["all"]).notes)
    assert "only a dense MLP's" in notes["model.layers.0.mlp.experts.down_proj"]


def test_seed(decoder: Any) -> None:
    def rotated(seed: int) -> Any:
        model = decoder("llama")
        rotate_(model, RotationSpec(seed=seed))
        return model.model.layers[0].self_attn.q_proj.weight

    assert torch.equal(rotated(1), rotated(1))
    assert not torch.equal(rotated(1), rotated(2))


def test_smoothing_afterwards_knows_the_online_rotation(decoder: Any, calibration: Any) -> None:
    """Catches up rows divided in one basis and down columns multiplied in another."""
    model = decoder("llama")
    before = logits(model)
    rotate_(model, SPECS["all"])
    report = smooth_(model, 0.5, calibration)
    assert moved(logits(model), before) < 1e-5
    assert "transformed online" in dict(report.skipped)["model.layers.0.mlp.down_proj"]


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gpt2", r"transformer\.h\.0\.ln_1 is a LayerNorm: only an RMSNorm"),
        ("gemma2", "two norms, of attention and MLP, are understood"),
        ("olmo2", "rotation changed what Olmo2ForCausalLM computes"),
    ],
)
def test_other_architectures_are_refused(family: str, why: str, decoder: Any) -> None:
    with pytest.raises(ValueError, match=why):
        rotate_(decoder(family), SPECS["R1"])


def test_refusal_changes_nothing(decoder: Any) -> None:
    model = decoder("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}
    for spec in (RotationSpec(block=10), RotationSpec(down=True, block=7)):
        with pytest.raises(ValueError, match="blocks of"):
            rotate_(model, spec)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_packed_codes_are_refused(decoder: Any) -> None:
    model = decoder("llama")
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj is stored as torch\.int8"):
        rotate_(model, SPECS["R1"])


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_hidden_states_are_the_plain_ones_rotated(family: str, decoder: Any) -> None:
    model = decoder(family)
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _m, _a, out: seen.append(out))
    logits(model)
    assert residual_rotation(model) is None
    plain_ones = [*seen]
    notes = dict(rotate_(model, SPECS["all"]).notes)
    seen.clear()
    logits(model)
    rotation = residual_rotation(model)
    assert rotation is not None
    assert "another basis" in notes["residual stream"]
    for plain, rotated in zip(plain_ones, seen, strict=True):
        assert moved(rotation.inverse(rotated).double(), plain.double()) < 1e-5
        assert moved(rotated.double(), plain.double()) > 0.5
