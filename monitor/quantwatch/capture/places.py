"""What a report says of the models themselves: where taps are, what is missing, what has fired."""

from collections.abc import Iterable, Mapping

from quantwatch.capture.basis import incomparable, refuse_as_reference
from quantwatch.capture.events import event_words
from quantwatch.capture.probe import Probe
from quantwatch.capture.report import CaptureReport
from quantwatch.domain import Scope, is_layer, layer_index
from quantwatch.errors import CaptureError
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.served.opening import NOT_MEASURABLE

REFERENCE = "reference"
"""Its name among the models."""


def describe(
    models: Mapping[str, LoadedModel], served: Iterable[str], report: CaptureReport
) -> None:
    """Note where the taps are in each model, and what is missing.

    Raises:
        CaptureError: a candidate lacks a place that can't be left out, or the reference can't
            be compared with.
    """
    reference = models[REFERENCE].anatomy
    refuse_as_reference(models[REFERENCE])
    for scope in {**reference.taps, **reference.linears}:
        report.missing[scope] = dict.fromkeys(served, NOT_MEASURABLE)
    for name, model in models.items():
        anatomy = model.anatomy
        for scope, reason in incomparable(model).items():
            report.missing.setdefault(scope, {})[name] = reason
        for scope, reason in anatomy.missing.items():
            report.missing.setdefault(scope, {})[name] = reason
        for scope in {**reference.taps, **reference.linears}:
            if scope in anatomy.taps:
                report.taps.setdefault(scope, {})[name] = anatomy.taps[scope]
            elif scope not in anatomy.linears:
                report.missing.setdefault(scope, {}).setdefault(name, "no such module")
        lost = [s for s in reference.taps if s not in anatomy.taps and _is_needed(s)]
        if lost or anatomy.num_layers != reference.num_layers:
            raise CaptureError(
                f"{name} has {anatomy.num_layers} layers and lacks {lost}; the reference has "
                f"{reference.num_layers} layers"
            )


def _is_needed(scope: Scope) -> bool:
    """Say whether a tap must be in both models: all but the attention and MLP of a layer."""
    return is_layer(scope) or layer_index(scope) is None


def prove(probes: Mapping[str, Probe], report: CaptureReport) -> None:
    """Note how often every tap fired, and what the kernels did unasked."""
    for name, probe in probes.items():
        report.num_forwards[name] = probe.counts.num_forwards
        report.events[name] = event_words(probe.counts.watch, probe.overflows())
        for scope, path in probe.routers.paths.items():
            report.routers.setdefault(scope, {})[name] = path
        for scope in probe.model.anatomy.taps:
            report.firings.setdefault(scope, {})[name] = probe.counts.firings[scope]
