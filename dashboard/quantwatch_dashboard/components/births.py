"""Tables of where values stop being finite: by candidate, and by prompt of one candidate."""

from collections.abc import Mapping, Sequence

from quantwatch.domain import RunResult
from quantwatch_dashboard.components.markup import Html, link, numbers, table, tag
from quantwatch_dashboard.components.words import swatch
from quantwatch_dashboard.logic.nonfinite import PromptBirth

_MOST = 100


def candidates(result: RunResult, counted: Mapping[str, int]) -> Html:
    """Return each candidate's first non-finite value and how many there are."""
    rows = []
    for index, candidate in enumerate(result.candidates):
        if candidate.failure is not None:
            continue
        first, count = candidate.first_nonfinite, counted.get(candidate.name, 0)
        where: object = "every value is finite"
        if first is not None:
            query = {"run": result.run_id, "candidate": candidate.name, "layer": first.scope}
            at = f"{first.scope}, prompt {first.prompt}, token {first.position}"
            where = link(at, "run", **query, prompt=str(first.prompt), token=str(first.position))
        elif count:
            where = "where the reference is not finite either"
        rows.append(
            [
                tag("td", swatch(index), candidate.name, class_="qw-name"),
                tag("td", where),
                tag("td", f"{count:,}", class_="qw-n qw-hot" if count else "qw-n"),
            ]
        )
    headers = ["Candidate", "First", *numbers("Values that are not finite")]
    return table(headers, rows, "qw-top")


def prompts(found: Sequence[PromptBirth], run_id: str, candidate: str) -> Html:
    """Return each prompt's first non-finite value, with a link to it."""
    rows = []
    for birth in found[:_MOST]:
        place = birth.first.place
        query = {"run": run_id, "candidate": candidate, "layer": birth.first.scope}
        prompt, position = str(place.prompt), str(place.position)
        there = link(prompt, "run", **query, prompt=prompt, token=position)
        rows.append(
            [
                tag("td", there),
                tag("td", birth.first.scope, class_="qw-mono qw-small"),
                tag("td", f"{position} “{place.label(16)}”"),
                birth.first.kind,
                tag("td", f"{birth.num_tokens:,}", class_="qw-n"),
            ]
        )
    headers = ["Prompt", "First at", "Token", "Kind", *numbers("Tokens")]
    return table(headers, rows, "qw-top qw-tall")
