"""Run a causal language model one decoder layer at a time over calibration inputs.

Calibration needs the inputs of each layer once, in order, after the layers before it have been
quantized: only one layer's hidden states are in memory, hidden[i] float [B, T, D] per input [B, T].

Nothing is known about an architecture but where its list of decoder layers is. The model's own
`forward` is run with every layer replaced by a stub that notes what it is called with (masks and
position embeddings, which may differ between layers) and hands its input on; what a layer reads of
the layer before it beside hidden states (a router's state) is carried along. `logits` runs it again
with stubs that hand on given hidden states, so that embedding scale, final norm, head and
soft-capping are the model's own. The same operations on the same batches in the same order: results
equal the plain forward pass bit for bit. Given up: models that do anything between two layers
(refused when the walk is made) and caches.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.decoder_layers import check_inputs, find_decoder_layers
from quantwatch_kernels.quantize.replaced import replaced

__all__ = ["LayerWalk"]


@dataclass(frozen=True, slots=True)
class _Call:
    """What one layer is called with for one input, its hidden states left out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    handed: Mapping[int | str, int] = field(default_factory=dict)
    """Arguments that the layer before it returns beside hidden states, and its place there."""

    def after(self, rest: Sequence[Any]) -> "_Call":
        """Return the call with what the layer before it returned beside hidden states."""
        new = {place: rest[at] for place, at in self.handed.items()}
        args = tuple(new.get(place, value) for place, value in enumerate(self.args))
        return _Call(args, {name: new.get(name, value) for name, value in self.kwargs.items()})


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
        self.current: int | None = None
        """Number of the input that a layer is being called on; None between calls."""
        self.num_calls = 0
        self._calls: list[list[_Call]] = []
        self._handed_on: list[dict[int, tuple[Any, ...]]] = [{} for _ in self.inputs]
        self._arguments = frozenset(inspect.signature(model.forward).parameters)
        self._rest = self._tuple_rest()
        for number in range(len(self.inputs)):
            hidden, calls = self._capture(number)
            self.hidden.append(hidden)
            self._calls.append(calls)

    def branch(self, numbers: Iterable[int] | None = None) -> "LayerWalk":
        """Return a walk at the same place with states of its own, of these inputs (None: all).

        It numbers its inputs anew. What either does behind this place doesn't concern the other.
        """
        chosen = list(range(len(self.inputs)) if numbers is None else numbers)
        walk = copy.copy(self)
        walk.inputs = tuple(self.inputs[number] for number in chosen)
        # Copies: a layer may work on what it is given.
        walk.hidden = [self.hidden[number].clone() for number in chosen]
        walk._calls = [self._calls[number] for number in chosen]
        walk._handed_on = [dict(self._handed_on[number]) for number in chosen]
        return walk

    def restarted(self) -> "LayerWalk":
        """Return a walk over the same inputs at the first layer, as the model is now."""
        walk = self.branch()
        walk.position = 0
        for number in range(len(walk.inputs)):
            walk.hidden[number], walk._calls[number] = walk._capture(number)
        return walk

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
                self._handed_on[number].pop(index - 1, None)
        self.position += 1
        return self.hidden

    def forwards(self, index: int) -> Iterator[Callable[[], Tensor]]:
        """Yield, for each input, a call of layer `index` on it: for hooks on its modules."""
        for number, hidden in enumerate(self.hidden):
            yield partial(self.call, index, number, hidden)

    def call(self, index: int, number: int, hidden: Tensor) -> Tensor:
        """Return layer `index`'s output for input `number`; differentiable, changes nothing."""
        call = self._calls[number][index]
        if call.handed:
            call = call.after(self._handed_on[number][index - 1])
        self.current, self.num_calls = number, self.num_calls + 1
        try:
            output = self.layers[index][1](hidden, *call.args, **call.kwargs)
        finally:
            self.current = None
        if self._calls[number][-1].handed:
            self._handed_on[number][index] = output[1:]
        return _first(output)

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
            calls.append(replace(call, handed=self._handed(call)))
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

    def _handed(self, call: _Call) -> Mapping[int | str, int]:
        """Return which arguments of a call are what the stubs return beside hidden states."""
        rest = {id(v): at for at, v in enumerate(self._rest or ()) if isinstance(v, Tensor)}
        given: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
        return {place: rest[id(value)] for place, value in given if id(value) in rest}

    @contextmanager
    def _stubs(self, stub: Callable[[int, Tensor, _Call], Tensor]) -> Iterator[None]:
        """Inside, `stub(index, hidden, call)` stands for every layer's forward, and for its hooks.

        A hook would see what no layer gets, change it a second time, or read a layer for nothing.
        """

        def forward_of(index: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                hidden = args[0] if args else kwargs.pop("hidden_states")
                result = stub(index, hidden, _Call(args[1:], kwargs))
                return result if self._rest is None else (result, *self._rest)

            return forward

        with ExitStack() as stack:
            for index, (_, module) in enumerate(self.layers):
                stack.enter_context(replaced(module, forward_of(index), with_hooks=False))
            yield


def _first(output: Any) -> Tensor:
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result
