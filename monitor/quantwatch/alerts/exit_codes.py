"""The exit code of a finished run."""

from quantwatch.domain import RunResult, RunStatus, Verdict

PASSED = 0
REGRESSION = 1
MONITOR_FAILED = 3
INCONCLUSIVE = 4
INTERRUPTED = 130


def exit_code(result: RunResult) -> int:
    """Return 0 pass, warn, improvement · 1 regression · 3 failed · 4 inconclusive · 130 cancelled.

    A regression outweighs a candidate that could not be measured. Code 2 (something the user named
    is wrong) comes from a UserError, never from a result.
    """
    if result.status == RunStatus.CANCELLED:
        return INTERRUPTED
    if result.status != RunStatus.SUCCEEDED:
        return MONITOR_FAILED
    verdicts = {candidate.verdict for candidate in result.candidates} | {result.verdict}
    if Verdict.REGRESSION in verdicts:
        return REGRESSION
    if any(candidate.failure is not None for candidate in result.candidates):
        return MONITOR_FAILED
    return INCONCLUSIVE if Verdict.INCONCLUSIVE in verdicts or None in verdicts else PASSED
