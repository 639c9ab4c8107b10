"""A model under observation: hooks on every tap, counted, and a forward that ends before the head.

The head is never called on a whole sequence: its input is taken and the forward stops there; logits
are computed afterwards in chunks of rows, from that input.
"""

import inspect
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantwatch.capture.batches import Batch
from quantwatch.capture.calls import Call
from quantwatch.capture.counts import Counts
from quantwatch.capture.prefill import Prefill
from quantwatch.capture.routers import Choices, RouterWatch
from quantwatch.domain import HEAD, Scope
from quantwatch.errors import CaptureError
from quantwatch.models.loaded import LoadedModel
from quantwatch_kernels.quantize.residual import overflows_uncounted, residual_overflows
from quantwatch_kernels.registry import watched


class Listener(Protocol):
    """What wants to see a model's taps and linears as they fire."""

    def before(self, scope: Scope, call: Call) -> None:
        """See a module's arguments before it runs."""

    def after(self, scope: Scope, module: nn.Module, call: Call, output: Any) -> None:
        """See a module's output after it ran. Must not change it."""


class _HeadReachedError(Exception):
    """Ends a forward pass at the head."""


class Probe:
    """Hooks on one model. A context manager: leaving it always removes every hook."""

    def __init__(self, name: str, model: LoadedModel) -> None:
        self.name = name
        self.model = model
        self.firings: Counter[Scope] = Counter()
        """How often each scope fired in the last forward."""
        self.counts = Counts()
        """Since the last `take_counts`; of overflows only those that were counted elsewhere."""
        self.routers = RouterWatch(model)
        self.choices = Choices()
        """Where the routers sent the tokens of the last forward."""
        self.prefill: Prefill | None = None
        """Keys and values of a prompt that goes in chunks; whoever runs them drops it."""
        self._overflows_before = residual_overflows(model.module)
        self._listener: Listener | None = None
        self._head_call: Call | None = None
        self._handles: list[RemovableHandle] = []
        self._parameters = inspect.signature(model.module.forward).parameters
        kinds = {parameter.kind for parameter in self._parameters.values()}
        configured = hasattr(model.module, "config")
        self._takes_anything = configured and inspect.Parameter.VAR_KEYWORD in kinds

    def __enter__(self) -> Self:
        try:
            self._hook(self.model.anatomy.taps, self._handles)
            self._handles.extend(self.routers.hook())
        except BaseException:
            _remove(self._handles)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _remove(self._handles)

    def _hook(self, places: Mapping[Scope, str], handles: list[RemovableHandle]) -> None:
        """Hook modules; `handles` has every hook that was made, however this ends."""
        for scope, path in places.items():
            module = self.model.module.get_submodule(path)
            before, after = partial(self._before, scope), partial(self._after, scope)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))

    def run(self, batch: Batch, listener: Listener) -> Tensor:
        """Run a batch up to the head and return the head's input [R, H] at the measured rows.

        Linears are listened to only while a batch is isolated, taps always.

        Raises:
            CaptureError: a tap did not fire exactly once.
        """
        self._listener, self.firings, self._head_call = listener, Counter(), None
        linears: list[RemovableHandle] = []
        try:
            if batch.isolated:  # hooks slow modules down: those on linears by a percent of a run
                self._hook(_only_linears(self.model), linears)
            ids, options = batch.token_ids(self.model.device), self._options(batch)
            with watched(self.counts.watch), self.routers.watching(batch) as self.choices:
                self._run_to_the_head(batch, ids, options)
        finally:
            self._listener = None
            _remove(linears)
        self._check_coverage()
        self.counts.firings.update(self.firings)
        self.counts.num_forwards += 1
        return batch.select(self._head_input(batch))

    def _run_to_the_head(self, batch: Batch, ids: Tensor, options: Mapping[str, Any]) -> None:
        with suppress(_HeadReachedError), ExitStack() as stack:
            if batch.chunk is not None and self.prefill is not None:
                stack.enter_context(self.prefill.attending(batch.chunk))
            self.model.module(ids, **options)

    def replay(self, module: nn.Module, call: Call, listener: Listener | None) -> Any:
        """Run one module again inside a forward, uncounted, its inner hooks going to `listener`."""
        outer = self._listener, self.firings
        self._listener, self.firings = listener, Counter()
        try:
            with overflows_uncounted(module), self.routers.paused():
                again = call if self.prefill is None else call.without(self.prefill.cache)
                return module.forward(*again.args, **again.kwargs)
        finally:
            self._listener, self.firings = outer

    def take_counts(self) -> Counts:
        """Return what was counted since the last time, overflows included, and begin anew."""
        taken, self.counts = self.counts, Counts()
        after = residual_overflows(self.model.module)
        taken.overflows.update(Counter(after) - Counter(self._overflows_before))
        self._overflows_before = after
        return taken

    def overflows(self) -> dict[str, int]:
        """Return scope → values that a narrow residual stream made infinite under observation.

        In the order of the modules, whoever counted them.
        """
        own = Counter(residual_overflows(self.model.module)) - Counter(self._overflows_before)
        found = own + self.counts.overflows
        names = self.model.anatomy.scopes_by_path
        paths = [path for path, _ in self.model.module.named_modules() if path in found]
        return {str(names.get(path, path)): found[path] for path in paths}

    def _options(self, batch: Batch) -> dict[str, Any]:
        if batch.chunk is not None:
            if batch.chunk.is_first:
                self.prefill = Prefill(self.model, len(batch.chunk.prompt.token_ids))
            if self.prefill is None:
                raise CaptureError(f"{self.name}: nothing is kept of a chunk's earlier tokens")
            return dict(self.prefill.options(batch.chunk))
        # A cache would grow each time attention is run again for its isolated error.
        wanted: dict[str, Any] = {"use_cache": False}
        mask = batch.mask(self.model.device)
        if mask is not None:
            wanted["attention_mask"] = mask
        return {
            name: value
            for name, value in wanted.items()
            if self._takes_anything or name in self._parameters
        }

    def _before(
        self, scope: Scope, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._listener is None:
            return
        if scope == HEAD:
            self.firings[scope] += 1
            self._head_call = Call(args, kwargs)
            raise _HeadReachedError
        self._listener.before(scope, Call(args, kwargs))

    def _after(
        self,
        scope: Scope,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        if self._listener is not None:
            self.firings[scope] += 1
            with watched(None):  # what looking takes is not the model's
                self._listener.after(scope, module, Call(args, kwargs), output)

    def _head_input(self, batch: Batch) -> Tensor:
        assert self._head_call is not None
        found = self._head_call.hidden(batch)
        if not found:
            raise CaptureError(
                f"{self.name}: the head ({self.model.anatomy.taps[HEAD]}) is not called on every "
                f"position of a batch of {len(batch.sequences)} × {batch.width} tokens"
            )
        return next(iter(found.values()))

    def _check_coverage(self) -> None:
        for scope, path in self.model.anatomy.taps.items():
            count = self.firings[scope]
            if count != 1:
                why = (
                    "it is never called, or a compiled or fused forward passes by its hooks"
                    if count == 0
                    else "the module is shared or called repeatedly"
                )
                raise CaptureError(
                    f"{self.name}: tap {scope} ({path}) fired {count} times in one forward "
                    f"instead of once: {why}"
                )


def _only_linears(model: LoadedModel) -> dict[Scope, str]:
    """Return the linears that aren't taps as well."""
    taps = model.anatomy.taps
    return {scope: path for scope, path in model.anatomy.linears.items() if scope not in taps}


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
