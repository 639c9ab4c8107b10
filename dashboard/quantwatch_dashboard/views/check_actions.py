"""What can be done about a check: run it, pause it, end its run."""

import streamlit as st

from quantwatch_dashboard import actions
from quantwatch_dashboard.components import answers, asking
from quantwatch_dashboard.logic.summaries import CheckSummary
from quantwatch_dashboard.queries import configured
from quantwatch_dashboard.views import acts, check_pins


def show(url: str, summary: CheckSummary) -> None:
    """Show the buttons; those that the role does not allow are off and say so."""
    check = summary.check
    with st.container(horizontal=True, key="qw-actions"):
        _running(url, check)
        _pausing(summary)
        _ending(summary)
        check_pins.unpinning(summary)
    check_pins.pinning(url, summary)


def _running(url: str, check: str) -> None:
    """Offer to run the check; off where nobody knows what it would measure."""
    if why := configured.why_not(url, check):
        asking.off("Run now", f"run-{check}", why)
        return
    asking.button(
        "Run now", lambda who: actions.run_now(who, check, asking.once(f"run-{check}")),
        key=f"run-{check}", done=_started,
    )  # fmt: skip


def _ending(summary: CheckSummary) -> None:
    """Offer to end the run that is under way or, without one, waits; and a quarantine."""
    check, unended = summary.check, summary.state.unended
    run = summary.under_way or next(iter(unended), None)
    # The buttons go with what they ended; what came of it does not.
    listed = [acts.cancel_key(run.run_id)] if run is not None else []
    if summary.state.quarantined_at is not None:
        listed.append(acts.release_key(check))
    answers.show(f"ends-{check}", listed)
    if run is not None:
        acts.cancel(run)
    if summary.state.quarantined_at is not None:
        acts.release(check)


def _started(result: object) -> str:
    run = getattr(result, "run_id", "")
    return f"Run {run} waits for a worker." if run else "A run waits for a worker."


def _pausing(summary: CheckSummary) -> None:
    # One key for both: what the one did is no longer true after the other.
    check = summary.check
    if summary.state.pause is None:
        asking.worded(
            "Pause", lambda who, why: actions.pause(who, check, why), key=f"pause-{check}",
            wants="Why, for the others", done="Paused: its slots are skipped until it is resumed.",
        )  # fmt: skip
    else:
        asking.button(
            "Resume", lambda who: actions.resume(who, check), key=f"pause-{check}",
            done="It runs again from its next slot on.",
        )  # fmt: skip
