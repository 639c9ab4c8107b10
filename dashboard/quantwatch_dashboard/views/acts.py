"""Acts that several pages offer: each is asked and answered in one way, which is true."""

from functools import partial

from quantwatch.domain import RunStatus
from quantwatch.store.states import UnendedRun
from quantwatch_dashboard import actions
from quantwatch_dashboard.components import asking
from quantwatch_dashboard.roles import Role


def cancel_key(run_id: str) -> str:
    """Return the key of the button that cancels a run."""
    return f"cancel-{run_id}"


def cancel(run: UnendedRun) -> None:
    """Offer to cancel a run that waits or is under way, unless that was asked already."""
    key = cancel_key(run.run_id)
    if run.cancel_requested_at is not None:
        asking.show_said(key)
        return
    asking.button(
        "Cancel run",
        partial(actions.cancel_run, run_id=run.run_id),
        key=key,
        ask="What it has measured so far is lost." if run.status.is_active else "It will not run.",
        done=_cancelled,
    )


def _cancelled(status: object) -> str:
    if status == RunStatus.CANCELLED:
        return "The run is cancelled."
    return "The run is asked to stop; its worker looks every few seconds."


def release_key(check: str) -> str:
    """Return the key of the button that ends a check's quarantine."""
    return f"release-{check}"


def release(check: str) -> None:
    """Offer to let a check run again that is in quarantine."""
    asking.button(
        "End quarantine",
        partial(actions.release, check=check),
        key=release_key(check),
        needs=Role.ADMIN,
        ask=f"What {check} did before no longer counts. If it makes workers fail again, it takes "
        "the time of other checks.",
        done=lambda ended: (
            "It may run again." if ended else "It was not in quarantine any more; it may run."
        ),
    )


def enable_key(endpoint: str) -> str:
    """Return the key of the button that enables an endpoint."""
    return f"enable-{endpoint}"


def enable(endpoint: str) -> None:
    """Offer to enable an endpoint that was disabled.

    What waits for a disabled one becomes dead letters, so nothing is promised but what comes.
    """
    asking.button(
        "Enable endpoint",
        partial(actions.enable_endpoint, name=endpoint),
        key=enable_key(endpoint),
        needs=Role.ADMIN,
        ask=f"{endpoint} is sent what comes from now on. What waited for it while it was disabled "
        "became dead letters; they stay until they are replayed.",
        done="Enabled. Its dead letters can be replayed on the page Alerts.",
    )
