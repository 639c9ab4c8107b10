"""Run a causal language model one decoder layer at a time over calibration inputs.

Calibration needs the inputs of each layer once, in order, after the layers before it have been
quantized: only one layer's hidden states are in memory, hidden[i] float [B, T, D] per input [B, T].

Nothing is known about an architecture but where its list of decoder layers is. The model's own
`forward` is run with every layer replaced by a stub that notes what it is called with (masks and
position embeddings, which may differ between layers) and hands its input on; `logits` runs it again
with stubs that hand on given hidden states, so that embedding scale, final norm, head and
soft-capping are the model's own. The same operations on the same batches in the same order: results
equal the plain forward pass bit for bit. Given up: models that do anything between two layers
(refused when the walk is made) and caches.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LayerWalk", "check_inputs", "find_decoder_layers"]


@dataclass(frozen=True, slots=True)
class _Call:
    """What one layer is called with for one input, its hidden states left out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Done(Exception):  # noqa: N818 — no error: the last layer has been reached
    pass


class LayerWalk:
    """The decoder layers of `model` and the hidden states that enter the next one.

    `layers` are (path, module) in order; `hidden` has one tensor [B, T, D] per input. Raises
    ValueError for bad inputs, a model in training mode, and one that can't be walked.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        """Capture the inputs of the first layer; no layer is run but the first, on one input."""
        check_inputs(model, inputs)
        if model.training:
            raise ValueError("a model must be in evaluation mode to be walked layer by layer.")
        self.model = model
        self.inputs = tuple(inputs)
        self.layers = find_decoder_layers(model)
        self.position = 0
        """Index of the layer whose inputs `hidden` are."""
        self.hidden: list[Tensor] = []
        self._calls: list[list[_Call]] = []
        self._arguments = frozenset(inspect.signature(model.forward).parameters)
        self._rest = self._tuple_rest()
        for number in range(len(self.inputs)):
            hidden, calls = self._capture(number)
            self.hidden.append(hidden)
            self._calls.append(calls)

    def run(self, index: int) -> list[Tensor]:
        """Replace `hidden`, the inputs of layer `index`, by its outputs, one input at a time.

        Raises ValueError unless it is that layer's turn.
        """
        if index != self.position or not 0 <= index < len(self.layers):
            raise ValueError(
                f"layer {index} can't run: the hidden states are the inputs of layer "
                f"{self.position} of {len(self.layers)}."
            )
        with torch.no_grad():
            for number, hidden in enumerate(self.hidden):
                self.hidden[number] = self.call(index, number, hidden)
        self.position += 1
        return self.hidden

    def forwards(self, index: int) -> Iterator[Callable[[], Tensor]]:
        """Yield, for each input, a call of layer `index` on it: for hooks on its modules."""
        for number, hidden in enumerate(self.hidden):
            yield partial(self.call, index, number, hidden)

    def call(self, index: int, number: int, hidden: Tensor) -> Tensor:
        """Return layer `index`'s output for input `number`; differentiable, changes nothing."""
        call = self._calls[number][index]
        return _first(self.layers[index][1](hidden, *call.args, **call.kwargs))

    def logits(self, number: int, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits of input `number` from the last layer's output, [B, T, V].

        Only at `positions` [n] if they are given: [B, n, V]; the head then runs at those alone,
        if the model's forward knows `logits_to_keep`.
        """

        def hand_on(index: int, given: Tensor, _: _Call) -> Tensor:
            return hidden if index == len(self.layers) - 1 else given

        keeps = positions is not None and "logits_to_keep" in self._arguments
        with self._stubs(hand_on):
            extra = {"logits_to_keep": positions} if keeps else {}
            result: Tensor = self.model(self.inputs[number], use_cache=False, **extra).logits
        return result if positions is None or keeps else result[:, positions]

    def finish(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Return the logits of every input from the last layer's outputs."""
        with torch.no_grad():
            return [self.logits(number, h) for number, h in enumerate(hidden)]

    def _capture(self, number: int) -> tuple[Tensor, list[_Call]]:
        first: list[Tensor] = []
        calls: list[_Call] = []

        def note(index: int, given: Tensor, call: _Call) -> Tensor:
            path = self.layers[index][0]
            if index != len(calls):
                raise ValueError(f"{path} is not called once and in order; it can't be walked.")
            first[:] = first or [given]
            if given is not first[0]:
                raise ValueError(f"the model changes hidden states before {path}.")
            calls.append(call)
            if index == len(self.layers) - 1:
                raise _Done
            return given

        with self._stubs(note), torch.no_grad():
            try:
                self.model(self.inputs[number], use_cache=False)
            except _Done:
                return first[0], calls
        raise ValueError(f"{self.layers[len(calls)][0]} is never called; it can't be walked.")

    def _tuple_rest(self) -> tuple[Any, ...] | None:
        """Return what layers return beside hidden states; None where they return a tensor."""
        kept: list[Any] = []
        path, layer = self.layers[0]

        def keep(_: nn.Module, __: object, output: Any) -> None:
            kept.append(output)
            raise _Done

        hook = layer.register_forward_hook(keep)
        try:
            with torch.no_grad():
                self.model(self.inputs[0], use_cache=False)
        except _Done:
            pass
        finally:
            hook.remove()
        if not kept:
            raise ValueError(f"{path} is never called; it can't be walked.")
        return tuple(kept[0][1:]) if isinstance(kept[0], tuple) else None

    @contextmanager
    def _stubs(self, stub: Callable[[int, Tensor, _Call], Tensor]) -> Iterator[None]:
        """Inside, `stub(index, hidden, call)` stands for every layer's forward."""

        def forward_of(index: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                hidden = args[0] if args else kwargs.pop("hidden_states")
                result = stub(index, hidden, _Call(args[1:], kwargs))
                return result if self._rest is None else (result, *self._rest)

            return forward

        kept = [module.__dict__.get("forward") for _, module in self.layers]
        try:
            for index, (_, module) in enumerate(self.layers):
                module.forward = forward_of(index)
            yield
        finally:
            for (_, module), before in zip(self.layers, kept, strict=True):
                del module.__dict__["forward"]
                if before is not None:
                    module.forward = before


def _first(output: Any) -> Tensor:
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


def check_inputs(model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Raise ValueError unless there are inputs, each token ids [B, T] of the model's vocabulary."""
    if not inputs:
        raise ValueError("calibration needs at least one input of token ids; there is none.")
    embed = getattr(model, "get_input_embeddings", lambda: None)()
    limit = getattr(embed, "num_embeddings", None)
    for number, ids in enumerate(inputs):
        if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
            raise ValueError(
                f"calibration input {number} must be token ids [B, T], at least one; "
                f"it is {ids.dtype} {list(ids.shape)}."
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (limit is not None and high >= limit):
            raise ValueError(
                f"calibration input {number} has token ids {low} … {high}; "
                f"the vocabulary has 0 … {limit - 1 if limit is not None else '…'}."
            )


def find_decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of the decoder layers: the one list as long as the config says.

    Raises ValueError if there is no such list, or more than one, or a layer is in it twice.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", None)
    if count is None:
        raise ValueError(f"{type(model).__name__} has no config that says num_hidden_layers.")
    # LongCat says num_layers, and counts each as two hidden layers.
    found = _outermost_lists(model, count) or _outermost_lists(model, _num_layers(text))
    if len(found) != 1:
        names = ", ".join(path for path, _ in found)
        raise ValueError(
            f"{type(model).__name__} must have exactly one list of {count} decoder layers; "
            f"it has {names or 'none'}."
        )
    path, layers = found[0]
    modules = dict(layers._modules)  # named_children() would drop a layer that is listed twice
    if len({id(module) for module in modules.values()}) < len(modules):
        raise ValueError(f"{path} lists a layer twice; it can't be walked layer by layer.")
    return [(f"{path}.{name}", module) for name, module in modules.items() if module is not None]


def _num_layers(config: Any) -> int:
    count = getattr(config, "num_layers", None)
    return count if isinstance(count, int) else -1


def _outermost_lists(model: nn.Module, count: int) -> list[tuple[str, nn.ModuleList]]:
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    start = next((p for p, module in model.named_modules() if module is decoder), "")
    found: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.get_submodule(start).named_modules(prefix=start):
        inside = any(path.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and len(module) == count and not inside:
            found.append((path, module))
    return found
