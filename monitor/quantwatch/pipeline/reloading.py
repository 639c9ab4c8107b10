"""The models of a stored run, loaded again: the very same, or it is an error."""

from dataclasses import dataclass, replace
from pathlib import Path

from quantwatch.config.load import parse
from quantwatch.config.schema import CandidateConfig, CheckConfig
from quantwatch.domain import CandidateResult, Fingerprint, RunResult, RunStatus, Suite, Variant
from quantwatch.errors import UserError
from quantwatch.models.compatibility import check_compatible
from quantwatch.models.loaded import LoadedModel
from quantwatch.pipeline.loading import load_one
from quantwatch.pipeline.measure import REFERENCE, suite_for
from quantwatch.pipeline.request import RunRequest


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What one candidate of a run was measured with."""

    request: RunRequest
    """Of the check as the run has it, with this candidate alone."""
    reference: LoadedModel
    candidate: LoadedModel
    suite: Suite

    @property
    def config(self) -> CandidateConfig:
        """The candidate's configuration."""
        return self.request.check.candidates[0]

    def released(self) -> "Reloaded":
        """Return the same with the reference as candidate: the candidate's memory is free then."""
        return replace(self, candidate=self.reference)


def choose_candidate(run: RunResult, name: str | None) -> CandidateResult:
    """Return the candidate that is named, or the only one that was measured.

    Raises UserError for a run without results, a name that the run doesn't have, a candidate that
    could not be measured, and when there are several to choose from.
    """
    if run.status is not RunStatus.SUCCEEDED:
        raise UserError(f"run {run.run_id} is {run.status}; only a succeeded run has shares")
    measured = [one for one in run.candidates if one.failure is None and one.variant is not None]
    names = ", ".join(one.name for one in measured) or "none"
    if name is None and len(measured) == 1:
        return measured[0]
    if name is None:
        raise UserError(f"run {run.run_id}: name one with --candidate; measured were: {names}")
    found = next((one for one in measured if one.name == name), None)
    if found is None:
        failed = run.find(name)
        why = f" ({failed.failure})" if failed is not None and failed.failure else ""
        raise UserError(f"run {run.run_id} did not measure {name!r}{why}; measured were: {names}")
    return found


def reload(run: RunResult, chosen: CandidateResult, base_dir: Path, cache_dir: Path) -> Reloaded:
    """Load reference, candidate and suite of a run again; relative paths start at `base_dir`.

    Raises UserError naming what is not what the run measured, and as loading does.
    """
    assert chosen.variant is not None
    for variant in (run.reference, chosen.variant):
        if variant is None or variant.source.get("kind") == "module":
            raise UserError(f"run {run.run_id} measured modules in memory: they can't be loaded")
    if chosen.variant.source.get("kind") == "served":
        raise UserError(
            f"run {run.run_id} measured {chosen.name} as a server: it has no layers to swap"
        )
    whole = parse(CheckConfig, run.config, f"configuration of run {run.run_id}")
    configs = tuple(c for c in whole.candidates if c.name == chosen.name)
    request = RunRequest(
        run.check, whole.model_copy(update={"candidates": configs}), base_dir, cache_dir
    )
    reference = load_one(request, REFERENCE, request.check.reference)
    _require_same(run, REFERENCE, run.reference, reference)
    suite = suite_for(request, reference)
    if suite.hash != run.suite_hash:
        raise UserError(
            f"run {run.run_id}: its suite {run.suite_name!r} reads otherwise now: "
            f"hash {suite.hash[:12]}…, the run's is {run.suite_hash[:12]}…"
        )
    candidate = load_one(request, chosen.name, configs[0])
    _require_same(run, chosen.name, chosen.variant, candidate)
    check_compatible(reference, candidate)
    return Reloaded(request, reference, candidate, suite)


def _require_same(run: RunResult, name: str, stored: Variant | None, now: LoadedModel) -> None:
    assert stored is not None
    found = now.variant.fingerprint
    differing = [
        f"{part} was {_short(getattr(stored.fingerprint, part))}, is {_short(getattr(found, part))}"
        for part in Fingerprint.__slots__
        if getattr(stored.fingerprint, part) != getattr(found, part)
    ]
    if differing:
        raise UserError(
            f"run {run.run_id}: {name} is not what was measured: {'; '.join(differing)}"
        )


def _short(digest: str) -> str:
    return f"{digest[:12]}…" if digest else "empty"
