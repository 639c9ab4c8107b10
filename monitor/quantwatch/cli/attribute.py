"""`quantwatch attribute`: what each layer of a candidate costs alone, and which to restore."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quantwatch.cli import options as o
from quantwatch.cli.attributing import Request, attributed
from quantwatch.cli.output import show, show_json, table
from quantwatch.cli.session import Session
from quantwatch.cli.streams import say

if TYPE_CHECKING:
    from quantwatch.domain import Attribution, RunResult

Detail = Literal["layer", "part", "linear"]
Named = Annotated[str | None, typer.Option(help="Which candidate; needed when there are several.")]
Tokens = Annotated[int, typer.Option(min=1, help="At most so many tokens of the run's suite.")]
How = Annotated[
    Detail, typer.Option(help="Layers; part: attention and MLP too; linear: those inside too.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of the choice of prompts and of the noise.")]
Out = Annotated[
    Path | None, typer.Option(help="Find the fewest layers to restore; write the recipe here.")
]
Tries = Annotated[int, typer.Option(min=1, help="At most so many runs of the check for --out.")]


def attribute(
    context: typer.Context, run: o.RunId, *,
    candidate: Named = None, tokens: Tokens = 1024, detail: How = "layer", seed: Seed = 0,
    out: Out = None, tries: Tries = 8,
    store: Annotated[bool, typer.Option("--store/--no-store", help="Keep it with the run.")] = True,
    json: o.AsJson = False,
) -> None:  # fmt: skip
    """Put each layer of a candidate into the reference alone: its share of the KL.

    With --out the fewest layers are found without whose quantization the check passes.
    """
    session = Session.of(context, json=json)
    request = Request(candidate, tokens, detail, seed, out, tries, store)
    stored, found = attributed(session, run, request)
    _deliver(found, stored, json=json)


def _deliver(found: "Attribution", run: "RunResult", *, json: bool) -> None:
    from quantwatch.report import attribution

    if json:
        show_json(attribution.document(found, run))
        return
    show(table(list(attribution.COLUMNS), attribution.rows(found)))
    say("\n".join([*attribution.lines(found, run), ""]))
