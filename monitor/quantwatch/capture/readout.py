"""Derive from a model how hidden states become logits: norm, head, scale and soft-capping."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from quantwatch.capture.plan import CapturePlan
from quantwatch.domain import FINAL_NORM, HEAD
from quantwatch.errors import ModelError
from quantwatch.models.loaded import LoadedModel
from quantwatch_kernels.compare.readout import Readout, why_not_float32

_MULTIPLIED = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVIDED = ("logits_scaling",)
_MULTIPLIES_LOGITS_SCALING = ("hyperclovax", "hyperclovax_vision_v2")
_SOFTCAPS = (
    *("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"),
    "final_logit_softcap",
)


def readout_of(model: LoadedModel) -> Readout:
    """Return the model's own final norm, head, logit scale and final soft-capping.

    That nothing else happens to the logits is checked by `observer.check_observer_effect`.
    """
    config = getattr(model.module, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    head = model.module.get_submodule(model.anatomy.taps[HEAD])
    return Readout(_norm(model), head, _scale(config), _first_number(config, _SOFTCAPS))


def check_products(reference: LoadedModel, plan: CapturePlan) -> None:
    """Raise ModelError where the lens is to round its factors and the head doesn't allow it."""
    reason = why_not_float32(readout_of(reference).head) if plan.rounds_lens else None
    if reason is not None:
        raise ModelError(
            f'{reference.variant.name}: lens_products = "{plan.lens_products}" is for a head that '
            f"is one float32 product: {reason}; unset lens_products"
        )


def _norm(model: LoadedModel) -> Callable[[Tensor], Tensor]:
    paths = (model.anatomy.taps.get(FINAL_NORM), model.anatomy.projection)
    parts = [model.module.get_submodule(path) for path in paths if path is not None]
    return nn.Sequential(*parts)


def _scale(config: Any) -> float:
    scale = _first_number(config, _MULTIPLIED)
    if scale is not None:
        return scale
    divisor = _first_number(config, _DIVIDED)
    if divisor is None:
        return 1.0
    multiplies = getattr(config, "model_type", "") in _MULTIPLIES_LOGITS_SCALING
    return divisor if multiplies else 1.0 / divisor


def _first_number(config: Any, names: tuple[str, ...]) -> float | None:
    values = (getattr(config, name, None) for name in names)
    return next((float(v) for v in values if isinstance(v, (int, float))), None)
