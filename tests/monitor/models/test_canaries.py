"""A planted fault is what it says, is where its turn is, and leaves nothing behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.monitor.tiny_models import llama
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from quantwatch.config.canary import CanaryConfig
from quantwatch.domain import Scope
from quantwatch.errors import ModelError
from quantwatch.models.anatomy import Anatomy, resolve
from quantwatch.models.canaries import Plant, next_place, places, plant_of, planted, twin
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.recipe import Recipe

IDS = torch.arange(8)[None]
DOWN = Scope("layers.1.mlp.down_proj")


def tiny(**changes: Any) -> tuple[Any, Anatomy]:
    module = llama(96, scale=4.0, **changes).eval()
    return module, resolve(module)


def state(module: nn.Module) -> dict[str, bytes]:
    return {
        name: tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }


def objects(module: nn.Module) -> list[int]:
    return [id(tensor) for tensor in (*module.parameters(), *module.buffers())]


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module(IDS).logits
    return found


@pytest.mark.parametrize("fault", ["channel", "scale", "layer"])
def test_what_is_planted(fault: str) -> None:
    """Catches a fault of another size, in the input's channels, or in weights beside it."""
    module, anatomy = tiny()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    place = Scope("layers.1") if fault == "layer" else DOWN
    with planted(module, anatomy, Plant(fault, 0.25, place, draw=37)) as channel:
        changed = {n for n, p in module.named_parameters() if not torch.equal(p, before[n])}
        weight = module.model.layers[1].mlp.down_proj.weight.detach()
        old = before["model.layers.1.mlp.down_proj.weight"]
        if fault == "channel":
            assert channel == 37 % 32
            expected = old.clone()
            expected[channel] *= 1.25
            assert torch.equal(weight, expected)
        else:
            assert channel is None
            assert torch.equal(weight, old * 1.25)
    inside = {n for n in before if n.startswith("model.layers.1.") and before[n].ndim == 2}
    assert changed == (inside if fault == "layer" else {"model.layers.1.mlp.down_proj.weight"})


@pytest.mark.parametrize("error", [None, ModelError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("make", ["plain", "packed", "tied"])
def test_nothing_is_left_behind(make: str, error: type[BaseException] | None) -> None:
    """Catches a model that goes on with the fault when something is raised, or with a rounded copy.

    The very tensors are there again, so that whoever shares them sees no difference.
    """
    module, anatomy = tiny()
    if make == "packed":
        module, anatomy = packed(module)
    if make == "tied":
        module.model.layers[0].mlp.down_proj.weight = module.model.layers[1].mlp.down_proj.weight
    before, ids, said = state(module), objects(module), logits(module)
    seen = None
    try:
        with planted(module, anatomy, Plant("scale", 0.5, DOWN, 0)):
            seen = logits(module)
            if error is not None:
                raise error
    except (ModelError, KeyboardInterrupt, SystemExit):
        pass
    assert seen is not None
    assert not torch.equal(seen, said)
    assert (state(module), objects(module)) == (before, ids)
    assert torch.equal(logits(module), said)


def packed(module: Any) -> tuple[Any, Anatomy]:
    quantize_(module, Recipe.named("int8-channel"), execution="aten")
    return module, resolve(module)


def test_packed_codes_carry_it_in_their_scales() -> None:
    """Catches layouts made before that go on being multiplied, and scales of another channel."""
    module, anatomy = packed(tiny()[0])
    part, x = module.model.layers[1].mlp.down_proj, torch.randn(3, 64)
    before = part(x)
    with planted(module, anatomy, Plant("channel", 0.5, DOWN, draw=5)) as channel:
        after = part(x)
    assert channel == 5
    others = [row for row in range(32) if row != channel]
    assert torch.equal(after[:, others], before[:, others])
    # Scale and product are rounded to bfloat16 on both sides: four times 2⁻⁸.
    assert torch.allclose(after[:, channel], 1.5 * before[:, channel], rtol=2**-6)
    assert torch.equal(part(x), before)


def test_a_tied_weight_is_changed_in_one_place() -> None:
    """Catches a fault in every layer that shares a weight, which would be located anywhere."""
    module, anatomy = tiny()
    shared = module.model.layers[1].mlp.down_proj.weight
    module.model.layers[0].mlp.down_proj.weight = shared
    with planted(module, anatomy, Plant("scale", 0.5, DOWN, 0)):
        assert module.model.layers[0].mlp.down_proj.weight is shared
        assert not torch.equal(module.model.layers[1].mlp.down_proj.weight, shared)


def test_a_twin_shares_tensors_and_no_fault() -> None:
    """Catches a second model in memory, and a fault of the copy that is in the original."""
    module, anatomy = tiny()
    said, copied = logits(module), twin(module)
    assert objects(copied) == objects(module)
    assert all(a is not b for a, b in zip(copied.modules(), module.modules(), strict=True))
    with planted(copied, anatomy, Plant("scale", 0.5, DOWN, 0)):
        assert torch.equal(logits(module), said)
        assert not torch.equal(logits(copied), said)


def test_every_place_has_its_turn() -> None:
    """Catches a place that never comes, one that comes twice, and the same order every round."""
    _, anatomy = tiny(num_hidden_layers=3)
    found = places(anatomy, CanaryConfig())
    assert len(found) == 21
    rounds = [[next_place(found, "nightly", 21 * r + i) for i in range(21)] for r in range(3)]
    assert all(sorted(each) == sorted(found) for each in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    assert rounds[0] == [next_place(found, "nightly", turn) for turn in range(21)]
    other = [next_place(found, "weekly", turn) for turn in range(21)]
    assert other != rounds[0]


def test_a_slot_decides_the_channel() -> None:
    """Catches a choice that another process would not make, and one that never changes."""
    config, found = CanaryConfig(), [DOWN]
    one = plant_of(config, found, "nightly", (4, "s:2026-11-30T02:00:00Z"))
    assert one == plant_of(config, found, "nightly", (4, "s:2026-11-30T02:00:00Z"))
    draws = {plant_of(config, found, "nightly", (4, f"s:{day}")).draw % 32 for day in range(40)}
    assert len(draws) > 10


@pytest.mark.parametrize(
    ("fault", "scope", "expected"),
    [
        ("layer", "*", {"layers.0", "layers.1"}),
        ("layer", "layers.1", {"layers.1"}),
        ("scale", "layers.*.mlp.down_proj", {"layers.0.mlp.down_proj", "layers.1.mlp.down_proj"}),
        ("channel", ("layers.0.attention",), {f"layers.0.attention.{c}_proj" for c in "qkvo"}),
    ],
    ids=["all layers", "one layer", "one linear of each", "what lies inside"],
)
def test_where(fault: Any, scope: Any, expected: set[str]) -> None:
    """Catches a glob that means something else than elsewhere."""
    _, anatomy = tiny()
    assert set(places(anatomy, CanaryConfig(fault=fault, scope=scope))) == expected


def zeroed(module: Any) -> None:
    module.model.layers[1].mlp.down_proj.weight.zero_()


def streamed(module: Any) -> None:
    module.model.layers[1].mlp.down_proj.to("meta")


def stacked(module: Any) -> None:
    part = module.model.layers[1].mlp.down_proj
    part.weight = nn.Parameter(torch.zeros(2, 32, 64), requires_grad=False)


def narrow(module: Any) -> None:
    part = module.model.layers[1].mlp.down_proj
    part.weight = nn.Parameter(part.weight.to(torch.float8_e4m3fn), requires_grad=False)


def computed(module: Any) -> None:
    nn.utils.parametrize.register_parametrization(
        module.model.layers[1].mlp.down_proj, "weight", nn.Identity()
    )


@pytest.mark.parametrize(
    ("change", "size", "said"),
    [
        (zeroed, 0.01, "is all 0"),
        (streamed, 0.01, "not in memory"),
        (stacked, 0.01, "with 3 axes"),
        (narrow, 0.01, "float8_e4m3fn"),
        (computed, 0.01, "computed from others"),
        (lambda _: None, 1e-9, "float32 rounds it away"),
    ],
    ids=["zero", "streamed", "stacked", "float8", "parametrized", "too small"],
)
def test_what_can_not_be_planted(change: Callable[[Any], None], size: float, said: str) -> None:
    """Catches a fault that is said to be there and is not."""
    module, anatomy = tiny()
    with torch.no_grad():
        change(module)
    ids = objects(module)
    with (
        pytest.raises(ModelError, match=said),
        planted(module, anatomy, Plant("scale", size, DOWN, 0)),
    ):
        pass
    assert objects(module) == ids


@pytest.mark.parametrize("family", ["mamba", "lfm2"])
@pytest.mark.parametrize("fault", ["channel", "scale", "layer"])
def test_convolutions_over_tokens_carry_it(family: str, fault: str) -> None:
    """Catches a model of which no layer could ever be planted in: its convolution has 3 axes."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
    if family == "lfm2":
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
        sizes |= {"layer_types": ["conv", "full_attention"]}
    config = AutoConfig.for_model(family, bos_token_id=0, eos_token_id=1, **sizes)
    module: Any = AutoModelForCausalLM.from_config(config).eval()
    anatomy = resolve(module)
    convolution = next(
        scope
        for scope, path in anatomy.linears.items()
        if isinstance(module.get_submodule(path), nn.Conv1d)
    )
    path = anatomy.linears[convolution]
    before, plain = state(module), logits(module)
    place = Scope("layers.0") if fault == "layer" else convolution
    with planted(module, anatomy, Plant(fault, 0.25, place, draw=37)) as channel:
        weight = module.get_submodule(path).weight.detach()
        old = torch.frombuffer(bytearray(before[f"{path}.weight"]), dtype=torch.float32)
        grown = weight / old.view(weight.shape)
        rows = range(len(weight)) if channel is None else [channel]
        changed = [n for n, row in enumerate(grown) if not torch.equal(row, torch.ones_like(row))]
        assert changed == [*rows]
        torch.testing.assert_close(grown[[*rows]], torch.full_like(grown[[*rows]], 1.25))
        assert not torch.equal(logits(module), plain)
    assert state(module) == before


def test_nowhere_to_plant() -> None:
    """Catches a scope that matches nothing and is taken for one that was searched."""
    _, anatomy = tiny()
    with pytest.raises(
        ModelError, match=r"no decoder layer of this model is in scope = 'layers\.7'"
    ):
        places(anatomy, CanaryConfig(fault="layer", scope="layers.7"))
