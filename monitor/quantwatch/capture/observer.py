"""Prove that looking doesn't change what is seen.

Once per run and model: the logits that the model itself returns, without hooks, against ours, that
are made from the head's input under hooks. A model that does something to its logits that we don't
know of is found here, and so is a module between the last layer and the head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quantwatch.capture.batches import Batch
from quantwatch.capture.calls import Call, hidden_output
from quantwatch.capture.probe import Probe
from quantwatch.domain import Scope, is_layer
from quantwatch.errors import CaptureError, ModelError, ResourceError
from quantwatch.models.loaded import LoadedModel
from quantwatch_kernels.compare.lens import Readout

_ROUNDINGS = 16
"""Allowed difference in units of the last place of the largest logit."""


def plain_logits(model: LoadedModel, batch: Batch) -> Tensor:
    """Return the model's own logits [R, V] of a batch without padding.

    Raises:
        ModelError: the model can't do a forward pass on token ids [B, T].
    """
    try:
        output: Any = model.module(batch.token_ids(model.device))
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        if "memory" in str(error).lower():
            raise ResourceError(f"{model.variant.name}: {error}") from error
        words = f"{type(error).__name__}: {error}"
        raise ModelError(f"{model.variant.name}: its forward failed: {words}") from error
    logits = getattr(output, "logits", output)
    return batch.select(hidden_output(logits, batch, f"{model.variant.name}: the model"))


def check_observer_effect(
    probe: Probe, readout: Readout, batch: Batch, plain: Tensor, *, lens: bool
) -> float:
    """Return the largest difference between plain logits and ours on one short prompt.

    Raises:
        CaptureError: it is beyond rounding, or (with `lens`) the last layer can't be read off.
    """
    listener = _LastLayer(batch)
    ours = readout.head_logits(probe.run(batch, listener))
    difference = _largest_difference(plain, ours)
    _check(probe, difference, plain, "its logits under observation differ from its own")
    if lens:
        through = _largest_difference(plain, readout.logits(listener.hidden))
        what = (
            f"its logits read off {listener.scope} through final norm and head differ from its own"
        )
        _check(probe, through, plain, what)
    return difference


class _LastLayer:
    """Keeps the output of the last layer that fires."""

    def __init__(self, batch: Batch) -> None:
        self.scope: Scope | None = None
        self.hidden = torch.empty(0)
        self._batch = batch

    def before(self, scope: Scope, call: Call) -> None:
        """Nothing is needed before a module runs."""

    def after(self, scope: Scope, _: nn.Module, __: Call, output: Any) -> None:
        """Keep a layer's output."""
        if is_layer(scope):
            self.scope = scope
            self.hidden = self._batch.copy(hidden_output(output, self._batch, scope))


def _largest_difference(plain: Tensor, ours: Tensor) -> float:
    if plain.shape != ours.shape:
        raise CaptureError(f"logits {list(ours.shape)} were expected, not {list(plain.shape)}")
    equal = (plain == ours) | (plain.isnan() & ours.isnan())
    difference = torch.where(equal, 0.0, (plain.double() - ours.double()).abs())
    return float(difference.nan_to_num(nan=torch.inf).max())


def _check(probe: Probe, difference: float, plain: Tensor, what: str) -> None:
    finite = plain[plain.isfinite()].abs()
    largest = float(finite.max()) if len(finite) else 1.0
    bound = _ROUNDINGS * torch.finfo(probe.model.dtype).eps * max(largest, 1.0)
    if difference > bound:
        raise CaptureError(
            f"{probe.name}: {what} by {difference:.3g}, more than rounding ({bound:.3g}): "
            "the model does something to them that quantwatch doesn't know"
        )
