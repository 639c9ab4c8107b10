"""Planted faults of known size, by which the monitor is watched itself."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from quantwatch.config.base import Strict
from quantwatch.config.durations import PositiveDuration
from quantwatch.config.scopes import as_globs, scope_problem

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
