"""Attribution: each part swapped by hand, in float64, and controls that are exactly nothing."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize import attribution
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.attribution import Attributed, Part, Terms
from quantwatch_kernels.quantize.decoder_layers import find_decoder_layers
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.quantize.stand_in import StandIn
from quantwatch_kernels.quantize.suffix import SuffixRun

Decoder = Callable[[str], Any]
HALVES = {
    "llama": ("self_attn", "mlp"),
    "gpt2": ("attn", "mlp"),
    "qwen2-moe": ("self_attn", "mlp"),
    "gemma": ("self_attn", "mlp"),
    "mixtral": ("self_attn", "mlp"),
}
FLOATS = (torch.float32, torch.float32)


def candidate_of(model: nn.Module, *, head: bool = True) -> Any:
    recipe = Recipe.named("int4-g16")
    candidate = copy.deepcopy(model)
    quantize_(candidate, replace(recipe, exclude=("router",) if head else recipe.exclude))
    return candidate


def parts_of(model: Any, candidate: Any, halves: tuple[str, ...] = ()) -> list[Part]:
    """Every layer, the halves that are named, embedding and head."""

    def part(name: str, path: str, place: Any, layer: int | None = None) -> Part:
        module, other = (m.get_submodule(path) for m in (model, candidate))
        return Part(name, module, other, place, layer, whole="." not in name)

    paths = {id(module): path for path, module in model.named_modules()}
    found = [part("embedding", paths[id(model.get_input_embeddings())], "embedding")]
    for index, (path, _) in enumerate(find_decoder_layers(model)):
        found.append(part(f"layer{index}", path, "layers", index))
        found += [part(f"layer{index}.{h}", f"{path}.{h}", "layers", index) for h in halves]
    return [*found, part("head", paths[id(model.get_output_embeddings())], "behind")]


def attribute(run: SuffixRun, candidate: Any, parts: list[Part], **more: Any) -> Attributed:
    """Attribute with the dtypes of the models' hidden states."""
    ours, theirs = (next(m.parameters()).dtype for m in (run.model, candidate))
    return attribution.attribute(run, candidate, parts, Terms((ours, theirs), **more))


def every_position(inputs: list[Tensor]) -> list[Tensor]:
    return [torch.arange(ids.shape[1]) for ids in inputs]


def run_of(model: Any, inputs: list[Tensor]) -> SuffixRun:
    return SuffixRun(model, inputs, every_position(inputs))


def twin_kl(model: Any, changed: Any, inputs: list[Tensor]) -> float:
    """Mean KL by its definition, float64, of two plain forward passes of everything."""
    rows = []
    with torch.no_grad():
        for ids in inputs:
            log_p, log_q = (m(ids).logits.double().log_softmax(-1) for m in (model, changed))
            rows.append((log_p.exp() * (log_p - log_q)).sum(-1).flatten())
    return torch.cat(rows).mean().item()


def by_hand(model: Any, part: Part, inputs: list[Tensor]) -> float:
    """Put a copy of the candidate's module into a copy of the reference, and run all of it."""
    path = next(path for path, module in model.named_modules() if module is part.module)
    changed = copy.deepcopy(model)
    changed.set_submodule(path, copy.deepcopy(part.other))
    return twin_kl(model, changed, inputs)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2-moe"])
def test_shares_are_those_of_swaps_by_hand(
    family: str, decoder: Decoder, calibration: list[Tensor]
) -> None:
    """Catches a wrong layer, position, state or module, and a swap that nobody notices."""
    model = decoder(family)
    candidate = candidate_of(model, head=family != "gpt2")
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in (model, candidate)]
    parts = parts_of(model, candidate, HALVES[family])
    found = attribute(run_of(model, calibration), candidate, parts)
    assert found.num_boundaries == 1 + len(find_decoder_layers(model)) + 1
    assert found.num_tokens == 60
    assert found.kl == pytest.approx(twin_kl(model, candidate, calibration), rel=1e-4)
    assert found.together_kl == found.kl
    assert [share.part for share in found.shares] == parts
    for share in found.shares:
        hand = by_hand(model, share.part, calibration)
        assert share.kl == pytest.approx(hand, rel=1e-3, abs=1e-12), share.part.name
    by_name = {share.part.name: share for share in found.shares}
    assert by_name["embedding"].kl == 0
    assert by_name["layer0"].kl > 0
    for model_, old in zip((model, candidate), before, strict=True):
        assert all(torch.equal(v, old[k]) for k, v in model_.state_dict().items())
        assert not any("forward" in m.__dict__ for m in model_.modules())


def test_errors_are_those_of_the_isolated_module(
    decoder: Decoder, calibration: list[Tensor]
) -> None:
    """Catches an error measured behind the part, on the candidate's own states, or not squared."""
    model = decoder("llama")
    candidate = candidate_of(model)
    found = attribute(run_of(model, calibration), candidate, parts_of(model, candidate))
    squares = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for ids in calibration:
            last = model.model(ids).last_hidden_state
            y, other = model.lm_head(last).double(), candidate.lm_head(last).double()
            squares += torch.stack([(other - y).square().sum(), y.square().sum()])
    (head,) = [share for share in found.shares if share.part.name == "head"]
    assert head.relative_error == pytest.approx((squares[0] / squares[1]).sqrt().item(), rel=1e-5)


def attributed(family: str, decoder: Decoder, inputs: list[Tensor], **more: Any) -> Attributed:
    model = decoder(family)
    candidate = candidate_of(model)
    parts = parts_of(model, candidate, HALVES[family])
    if (order := more.pop("order", None)) is not None:
        random.Random(order).shuffle(parts)
    return attribute(run_of(model, inputs), candidate, parts, **more)


def figures(found: Attributed) -> dict[str, tuple[float, float, float]]:
    return {s.part.name: (s.kl, s.noise_kl, s.relative_error) for s in found.shares}


@pytest.mark.parametrize("order", range(3))
def test_order_says_nothing(order: int, decoder: Decoder, calibration: list[Tensor]) -> None:
    """Catches states that a swap leaves behind, and noise that depends on who came before."""
    found = [attributed("gemma", decoder, calibration, order=o) for o in (None, order)]
    assert figures(found[0]) == figures(found[1])
    assert all(min(values) >= 0 for values in figures(found[0]).values())


def _turns(model: Any) -> list[int]:
    """Note each decoder layer that is called after another: what one that is streamed is read for."""
    turns: list[int] = []

    def note(index: int) -> None:
        if turns[-1:] != [index]:
            turns.append(index)

    for index, (_, layer) in enumerate(find_decoder_layers(model)):
        layer.register_forward_pre_hook(lambda *_, index=index: note(index))
    return turns


def test_what_is_carried_along_says_nothing(decoder: Decoder, calibration: list[Tensor]) -> None:
    """Catches detours that mix, and layers that are gone through once per part or per input."""
    model = decoder("llama")
    model.model.layers.extend(copy.deepcopy(layer) for layer in [*model.model.layers] * 2)
    model.config.num_hidden_layers = count = 6
    candidate = candidate_of(model)
    parts = parts_of(model, candidate, HALVES["llama"])
    ours, theirs = _turns(model), _turns(candidate)
    found, rounds = [], []
    states = sum(ids.numel() * 48 * 4 for ids in calibration)
    for carried in (0, 20 * states, 10**9):
        ours.clear()
        theirs.clear()
        run = run_of(model, calibration)
        found.append(figures(attribute(run, candidate, parts, carried_bytes=carried)))
        rounds.append((ours.count(count - 1), theirs.count(count - 1)))
    assert found[0] == found[1] == found[2]
    # Its logits, all parts together, the walk; and, before it is there, what began at each of
    # layers 0 to 3, or at the first ones together.
    assert rounds == [(3 + 4, 3), (3 + 1, 3), (3, 3)]


def test_noise_is_seeded(decoder: Decoder, calibration: list[Tensor]) -> None:
    """Catches noise that no second run repeats, and a seed that does nothing."""
    one, same, other = (
        figures(attributed("llama", decoder, calibration, seed=seed)) for seed in (1, 1, 2)
    )
    assert one == same
    assert {n: v[0] for n, v in one.items()} == {n: v[0] for n, v in other.items()}
    assert one["layer0"][1] != other["layer0"][1]


def test_noise_is_as_large_as_the_error() -> None:
    """Catches noise of one size for all tokens, and noise along the error."""
    torch.manual_seed(0)
    module, other = nn.Linear(16, 64), nn.Linear(16, 64)
    x = torch.randn(2, 7, 16) * torch.logspace(-2, 2, 7)[:, None]
    stand = StandIn(module, other, FLOATS, "it", 0)
    with torch.no_grad():
        y, error = module(x), other(x) - module(x)
        with stand.as_("noise"):
            noise = module(x) - y
    torch.testing.assert_close(noise.norm(dim=-1), error.norm(dim=-1), rtol=1e-4, atol=1e-5)
    cosine = torch.cosine_similarity(noise, error, dim=-1)
    assert cosine.abs().max() < 0.6
    assert torch.equal(module(x), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("steps", [0.02, 0.3, 4.0], ids=["few steps", "steps", "above"])
def test_noise_is_as_large_when_it_is_rounded(dtype: torch.dtype, steps: float) -> None:
    """Catches noise that vanishes, or grows, on the grid of a stream with a few huge channels."""
    torch.manual_seed(0)
    x = torch.randn(1, 64, 256)
    x[..., 0] = 200
    x = x.to(dtype)
    spacing = x.double().abs() * torch.finfo(dtype).eps
    moved = (torch.rand(x.shape) < steps) * max(1.0, steps)
    other = (x.double() + moved * spacing * torch.randn(x.shape).sign()).to(dtype)
    stand = StandIn(nn.Identity(), _Constant(other), (dtype, dtype), "it", 0)
    with stand.as_("noise"):
        noise = stand.module(x).double() - x.double()
    error = other.double() - x.double()
    assert (error != 0).any(-1).all()
    assert noise.norm().item() == pytest.approx(error.norm().item(), rel=0.005)
    off = (noise.norm(dim=-1) / error.norm(dim=-1) - 1).abs()
    assert off.quantile(0.9) < 0.02
    assert off.max() < 0.1
    assert torch.cosine_similarity(noise, error, dim=-1).abs().mean() < 0.1


class _Constant(nn.Module):
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, _: Tensor) -> Tensor:
        return self.output


def test_direction_against_size(decoder: Decoder, calibration: list[Tensor]) -> None:
    """Catches a noise control that tells nothing: logits all shifted alike cost nothing, noise does."""
    model = decoder("llama")
    candidate = copy.deepcopy(model)
    candidate.lm_head.bias = nn.Parameter(torch.full((96,), 3.0), requires_grad=False)
    found = attribute(run_of(model, calibration), candidate, parts_of(model, candidate))
    head = found.shares[-1]
    assert head.kl < 1e-10
    assert head.noise_kl > 0.1


def test_equal_models_have_no_shares(decoder: Decoder, calibration: list[Tensor]) -> None:
    """Catches a division by a KL of 0, and float noise that is called a share."""
    model = decoder("llama")
    parts = parts_of(model, copy.deepcopy(model))
    found = attribute(run_of(model, calibration), copy.deepcopy(model), parts)
    assert (found.kl, found.together_kl) == (0, 0)
    assert all(s.kl == s.noise_kl == s.relative_error == 0 for s in found.shares)


class _InPlace(nn.Module):
    """A layer that works on the stream it is given."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        kept = hidden_states.clone()
        hidden_states.mul_(0)
        return self.layer(kept, *args, **kwargs)


def test_layers_that_work_in_place(decoder: Decoder, calibration: list[Tensor]) -> None:
    """Catches boundary states that the first run behind them destroys."""
    plain = attributed("llama", decoder, calibration)
    model = decoder("llama")
    candidate = candidate_of(model)
    parts = parts_of(model, candidate)
    for one in (model, candidate):
        layers = one.model.layers
        for index in range(len(layers)):
            layers[index] = _InPlace(layers[index])
    parts = parts_of(model, candidate)
    found = attribute(run_of(model, calibration), candidate, parts)
    ours = figures(plain)
    assert {n: v[0] for n, v in figures(found).items()} == {s.part.name: ours[s.part.name][0] for s in found.shares}  # fmt: skip


def test_a_candidate_in_another_dtype(decoder: Decoder, calibration: list[Tensor]) -> None:
    """Catches a dtype that leaks into the rest of the reference."""
    model = decoder("llama")
    candidate = copy.deepcopy(model).to(torch.bfloat16)
    parts = parts_of(model, candidate)
    found = attribute(run_of(model, calibration), candidate, parts)
    assert all(share.kl > 0 for share in found.shares)
    assert found.together_kl == pytest.approx(found.kl, rel=0.5)


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe"])
def test_a_router_wider_than_its_model(
    family: str, decoder: Decoder, calibration: list[Tensor]
) -> None:
    """Catches experts fed the dtype of the widened router: wrong shares, or an error inside."""
    model = decoder(family).bfloat16()
    candidate = candidate_of(model)
    assert candidate.model.layers[0].mlp.gate.weight.dtype == torch.float32
    parts = parts_of(model, candidate, HALVES[family])
    found = attribute(run_of(model, calibration), candidate, parts)
    assert found.together_kl == found.kl
    for share in found.shares:
        hand = by_hand(model, share.part, calibration)
        assert share.kl == pytest.approx(hand, rel=1e-3, abs=1e-12), share.part.name
    assert all(share.kl > 0 for share in found.shares if share.part.name.endswith("mlp"))


def test_bad_input_is_named(decoder: Decoder, calibration: list[Tensor]) -> None:
    """Catches a silent no-op, a NaN that becomes a share, and positions outside a text."""
    model = decoder("llama")
    candidate = candidate_of(model)
    run = run_of(model, calibration)
    stray = Part("stray", nn.Linear(2, 2), nn.Linear(2, 2), "layers", 0, whole=True)
    with pytest.raises(ValueError, match="stray is never called"):
        attribute(run, candidate, [stray])
    found = attribute(run, candidate, [replace(stray, may_rest=True)])
    assert found.shares[0].kl == 0
    parts = [replace(stray, whole=False), *parts_of(model, candidate)]
    found = attribute(run_of(model, calibration), candidate, parts)
    assert found.never_called == ("stray",)
    assert [share.part.name for share in found.shares] == [part.name for part in parts[1:]]
    with pytest.raises(ValueError, match="must stand at layer 0; it stands at 2"):
        attribute(run, candidate, parts_of(model, candidate))
    with pytest.raises(ValueError, match="each its own"):
        attribute(run_of(model, calibration), candidate, [stray, stray])
    candidate.model.layers[1].mlp.up_proj.weight[3, 3] = torch.nan
    with pytest.raises(ValueError, match="the candidate: its KL is nan"):
        attribute(run_of(model, calibration), candidate, parts_of(model, candidate))
    for places in ([20], [-1], []):
        with pytest.raises(ValueError, match=r"some of 0 … 19"):
            SuffixRun(model, calibration, [torch.tensor(places, dtype=torch.long)] * 2)
    with pytest.raises(ValueError, match="as many scored positions"):
        SuffixRun(model, calibration, [torch.tensor([1])])


def test_a_model_that_never_computes_the_same_is_refused(
    decoder: Decoder, calibration: list[Tensor]
) -> None:
    """Catches shares below the model's own noise: the control isn't 0."""
    model = decoder("llama")
    candidate = candidate_of(model)
    parts = parts_of(model, candidate)
    run = run_of(model, calibration)
    hook = model.model.norm.register_forward_hook(lambda *a: a[2] + 1e-3 * torch.randn_like(a[2]))
    with pytest.raises(ValueError, match=r"nothing is swapped, and KL is .*, not 0"):
        attribute(run, candidate, parts)
    hook.remove()
