"""What the linear layers of a model are really fed: a few rows of each on a text."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class FedLayer:
    """A linear layer by its canonical name, its weight and some of its inputs."""

    scope: str
    weight: Tensor
    """[N, K], float32."""
    inputs: Tensor
    """[rows, K], float32."""

    @property
    def kind(self) -> str:
        """Last component of the name: q_proj, down_proj, …"""
        return self.scope.rpartition(".")[2]


def fed_layers(
    module: nn.Module, linears: dict[str, str], ids: Tensor, *, rows: int = 16
) -> Iterator[FedLayer]:
    """Run token ids [1, T] once and yield each linear layer with `rows` of its inputs.

    `linears` maps canonical names to module paths; the rows are spread evenly over the positions.
    Raises ValueError when a layer is not a plain linear one or isn't reached.
    """
    found: dict[str, Tensor] = {}
    hooks = []
    for scope, path in linears.items():
        layer = module.get_submodule(path)
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{scope} is a {type(layer).__name__}; bounds need a linear layer.")
        hooks.append(layer.register_forward_pre_hook(_keeper(found, scope, rows)))
    try:
        with torch.inference_mode():
            module(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for scope, path in linears.items():
        if scope not in found:
            raise ValueError(f"{scope} was not reached by {ids.shape[1]} tokens.")
        weight = module.get_submodule(path).get_parameter("weight").detach().float()
        yield FedLayer(scope, weight, found[scope])


def _keeper(found: dict[str, Tensor], scope: str, rows: int):  # type: ignore[no-untyped-def]
    def keep(_layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        flat = arguments[0].detach().reshape(-1, arguments[0].shape[-1])
        chosen = torch.linspace(0, len(flat) - 1, min(rows, len(flat))).long()
        found[scope] = flat[chosen].float()

    return keep
