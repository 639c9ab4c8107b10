"""`quantwatch report RUN`: a stored run in any format."""

import typer

from quantwatch.cli import options as o
from quantwatch.cli.output import Delivery
from quantwatch.cli.session import Session


def report(
    context: typer.Context,
    run: o.RunId,
    format_: o.AsFormat = None,
    output: o.Output = None,
) -> None:
    """Print or write a stored run.

    The format is Markdown unless --format or the suffix of --output says otherwise.
    """
    result = Session.of(context).stored(run)
    if output:
        Delivery(json=False, shown=format_, files=output).write(result)
    else:
        Delivery(json=False, shown=format_ or "md", files=None).deliver(result)
