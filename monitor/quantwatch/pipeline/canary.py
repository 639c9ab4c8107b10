"""A canary: a fault of known size, planted in a copy and judged as a candidate of the night.

It runs when all of the run is measured and judged and nothing is stored yet, while the models are
in memory. The planted copy is measured on the prompts with isolated errors (or all) in the same
batches and at the same positions, so that every number is tonight's own but for the fault. Rules,
noise floor and baseline are the night's, the baseline's prompt sums cut to the same prompts. What
the rules say is compared with what they say without the fault (alerts/sighting.py).

Nothing of it reaches the run: own sink, own report, own judgement. Whatever goes wrong makes it
"not measurable", with the reason; only a run that was cancelled or taken away stops.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import perf_counter

from quantwatch.alerts.sighting import ISOLATED, Sighting, sighting
from quantwatch.capture.sampling import isolated_prompts
from quantwatch.config.canary import CanaryConfig
from quantwatch.domain import Canary, Progress, Scope, Suite
from quantwatch.errors import LeaseLostError, ModelError, RunStoppedError
from quantwatch.models.canaries import Plant, places, plant_of, planted, twin
from quantwatch.models.loaded import LoadedModel
from quantwatch.pipeline.canary_judge import Night, control_of, counting, seen_with_fault
from quantwatch.pipeline.measure import REFERENCE, Measured, Models, measure_models
from quantwatch.pipeline.reasons import explain
from quantwatch.store.canaries import Due
from quantwatch.store.kinds import finite_or_none


def carry_canary(night: Night, config: CanaryConfig, due: Due, progress: Progress) -> Canary:
    """Plant the fault whose turn it is, measure and judge it; the models end as they were.

    Raises LeaseLostError and RunStoppedError; anything else is a reason.
    """
    started, flight = perf_counter(), _Flight(night, config, due, _AsCanary(progress))
    canary = Canary(
        candidate=night.name,
        of=config.of,
        turn=due.turn,
        fault=config.fault,
        size=config.size,
        place=None,
        channel=None,
        made_at=night.result.finished_at or night.result.started_at,
        seconds=0.0,
        state="not measurable",
    )
    try:
        canary = flight.measured(canary)
    except (LeaseLostError, RunStoppedError):
        raise
    # Whatever it is: the run has its results, and nothing of them depends on this.
    except Exception as error:  # noqa: BLE001
        canary = replace(canary, place=flight.place, reason=explain(error).message)
    return replace(canary, seconds=perf_counter() - started)


class _AsCanary:
    """Shows the stages of a canary under its own name."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def start(self, stage: str, total_tokens: int) -> None:
        """Begin a stage."""
        self._progress.start("canary" if total_tokens else stage, total_tokens)

    def advance(self, tokens: int) -> None:
        """Count tokens."""
        self._progress.advance(tokens)


@dataclass
class _Flight:
    """One canary on its way."""

    night: Night
    config: CanaryConfig
    due: Due
    progress: Progress
    plant: Plant | None = None

    @property
    def place(self) -> Scope | None:
        """Where the fault is planted, once that is known."""
        return None if self.plant is None else self.plant.place

    def measured(self, canary: Canary) -> Canary:
        """Return the canary with what was seen of it. Raises ModelError where nothing can be."""
        if not self.night.measured.models.candidates:
            raise ModelError("no candidate is loaded here, and nothing can be planted in a server")
        if (reason := self._why_not()) is not None:
            raise ModelError(reason)
        carrier = self._carrier()
        found, slot = self._places(carrier), (self.due.turn, self.due.slot)
        self.plant = plant = plant_of(self.config, found, self.night.request.name, slot)
        suite = self._suite()
        rows = _rows(self.night.measured.suite, suite)
        with (
            planted(carrier.module, carrier.anatomy, plant) as channel,
            self._measure(carrier, suite) as copied,
        ):
            seen = seen_with_fault(self.night, copied, rows)
        if seen.result.find(ISOLATED, plant.place) is None:
            raise ModelError(f"no isolated error is measured at {plant.place}: it can't be located")
        control = control_of(self.night, rows) if self.night.has_baseline else None
        seen_of_it = sighting(plant.place, seen, control, counting(self.night, rows))
        return _with(replace(canary, place=plant.place, channel=channel), seen_of_it)

    def _why_not(self) -> str | None:
        measured, check = self.night.measured, self.night.request.check
        spent = sum(measured.timings_s.values())
        if self.due.attempt > 1:
            return (
                f"attempt {self.due.attempt} of its run: what may have ended the one before is not "
                "tried again"
            )
        if check.memory == "streamed":
            return "streamed: a layer's weights are read anew whenever it runs"
        if not check.isolated_fraction:
            return "isolated_fraction = 0: without isolated errors nothing is located"
        if REFERENCE in measured.report.first_nonfinite:
            return "the reference itself is not finite: nothing can be told"
        if self.due.left_s is not None and self.due.left_s < spent:
            return (
                f"{self.due.left_s:.0f} s are left before the run's deadline; it took {spent:.0f} s"
            )
        return None

    def _places(self, carrier: LoadedModel) -> list[Scope]:
        """Return the places that have an isolated error tonight: nothing else could be located.

        Raises ModelError when there is none.
        """
        found = places(carrier.anatomy, self.config)
        if self.config.of == "reference":
            return found
        rows = next(c for c in self.night.result.candidates if c.name == self.night.name)
        measured = [scope for scope in found if rows.find(ISOLATED, scope) is not None]
        if not measured:
            raise ModelError(f"no isolated error is measured at any of {len(found)} places")
        return measured

    def _carrier(self) -> LoadedModel:
        """Return the model that is planted in: never modules that the reference runs, too."""
        models = self.night.measured.models
        own = self.config.of == "candidate"
        carrier = models.candidates[self.night.name] if own else models.reference
        theirs = set(map(id, models.reference.module.modules()))
        if theirs.isdisjoint(map(id, carrier.module.modules())):
            return carrier
        return replace(carrier, module=twin(carrier.module))

    def _suite(self) -> Suite:
        """Return the suite with the prompts that it is measured on; its hash picks the tokens."""
        suite, check = self.night.measured.suite, self.night.request.check
        if self.config.prompts == "all":
            return suite
        chosen = isolated_prompts(suite, check.isolated_fraction)
        return replace(suite, prompts=tuple(p for p in suite.prompts if p.index in chosen))

    def _measure(self, carrier: LoadedModel, suite: Suite) -> AbstractContextManager[Measured]:
        plan, name = self.night.request.plan, self.night.name
        if self.config.prompts == "isolated":
            plan = replace(plan, isolated_fraction=1.0)
        plan = replace(plan, floor_fraction=0.0, condition_tokens=0)  # the night has its floor
        models = Models(self.night.measured.models.reference, {name: carrier}, {}, {name: ()})
        return measure_models(self.night.request, models, suite, self.progress, plan)


def _rows(whole: Suite, part: Suite) -> Sequence[int]:
    """Return the part's prompts by their place among all, in order."""
    wanted = {prompt.index for prompt in part.prompts}
    every = sorted(prompt.index for prompt in whole.prompts)
    return [place for place, index in enumerate(every) if index in wanted]


def _with(canary: Canary, found: Sighting) -> Canary:
    if found.masked is not None:
        words = f"rule {found.masked.rule} breaches at {found.masked.scope} without it"
        return replace(canary, reason=f"not to be told apart: {words}")
    alert = found.alert
    if alert is None:
        grown = "not measured" if found.after is None else f"{found.before:.4g} → {found.after:.4g}"
        words = f"isolated error at {canary.place}: {grown}"
        return replace(canary, state="measured", found=False, located=False, reason=words)
    return replace(
        canary,
        state="measured",
        found=True,
        located=found.located,
        named=found.named,
        rule=alert.rule,
        scope=alert.scope,
        value=finite_or_none(alert.value),
        threshold=finite_or_none(alert.threshold),
    )
