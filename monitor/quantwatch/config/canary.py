"""Planted faults of known size, by which the monitor is watched itself."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from quantwatch.config.base import Strict
from quantwatch.config.durations import PositiveDuration
from quantwatch.config.scopes import as_globs, scope_problem

if TYPE_CHECKING:
    from quantwatch.config.schema import CheckConfig

Globs = str | tuple[str, ...]


def _places(globs: Globs) -> Globs:
    if not as_globs(globs):
        raise ValueError("scope is empty; give at least one glob")
    for glob in as_globs(globs):
        if (problem := scope_problem(glob)) is not None:
            raise ValueError(problem)
    return globs


class CanaryConfig(Strict):
    """A fault that is planted in a copy while a run still has its models in memory."""

    fault: Literal["channel", "scale", "layer"] = Field(
        default="channel",
        description="channel: one output channel of one linear layer. scale: all of one linear "
        "layer's weight. layer: the weights of all linear layers of one decoder layer.",
    )
    size: float = Field(
        default=0.01,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="By which part of themselves the weights are made larger: 0.01 is × 1.01.",
    )
    of: Literal["candidate", "reference"] = Field(
        default="reference",
        description="Copied is the reference: there everything but the fault is equal, so that a "
        "small one is found. Or the first candidate that could be loaded, whose own errors hide "
        "small ones.",
    )
    scope: Annotated[Globs, AfterValidator(_places)] = Field(
        default="*",
        description="Where it may be planted: a glob over scopes, or a list of them. The place "
        "is another one every time, until all had their turn.",
    )
    prompts: Literal["isolated", "all"] = Field(
        default="isolated",
        description="Which prompts it is measured on: those with isolated errors, or the whole "
        "suite, which costs as much as another candidate.",
    )
    every: PositiveDuration = Field(
        default="20h", description="A run carries one when the check's last is at least this old."
    )


def canary_problems(check: "CheckConfig") -> Iterator[tuple[str, str]]:
    """Yield what keeps a check's canary from ever being seen, whatever its models are.

    A key of the check and what is wrong with it; what only models can tell is found by the run.
    """
    if check.canary is None:
        return
    if check.memory == "streamed":
        yield (
            "memory",
            '"streamed" is not allowed with a canary, which is planted in weights that stay in '
            'memory; allowed: "resident"',
        )
    if not check.isolated_fraction:
        yield (
            "isolated_fraction",
            "0 is not allowed with a canary, which is located by isolated errors; allowed: more "
            "than 0",
        )
    if all(candidate.served is not None for candidate in check.candidates):
        yield (
            "candidates",
            "all of them are served, and a canary is judged as a candidate that is loaded; "
            "allowed: at least one with model or factory",
        )
    yield from (("canary.scope", words) for words in _no_place(check.canary))


def _no_place(canary: CanaryConfig) -> Iterator[str]:
    """Yield the globs in which no model has a place for the fault: all lie in decoder layers."""
    for glob in as_globs(canary.scope):
        depth = glob.count(".")
        if glob == "*":
            continue
        if canary.fault == "layer" and depth != 1:
            allowed = 'allowed with fault = "layer": * and layers.N'
            yield f"{glob!r} is no decoder layer; {allowed}"
        elif not depth:
            allowed = f'allowed with fault = "{canary.fault}": * and globs that begin with layers.'
            yield f"{glob!r} has no linear layer of a decoder layer; {allowed}"
