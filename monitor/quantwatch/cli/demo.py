"""`quantwatch demo`: a real model, four candidates, one planted fault, and whether it was found."""

from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Annotated

import typer

from quantwatch.cli import options as o
from quantwatch.cli.dashboard import LOOPBACK, check_port, serve
from quantwatch.cli.output import Delivery
from quantwatch.cli.running import execute
from quantwatch.cli.session import Session, cache_dir
from quantwatch.cli.streams import whisper

if TYPE_CHECKING:
    from quantwatch.domain import RunResult

CHECK = "demo"
_VERDICTS = {"bf16": "pass", "int8": "pass", "int4-g64": "warn", "int8-fault": "regression"}
_FAULTY, _LAYER = "int8-fault", "layers.14"
_CULPRITS = (f"{_LAYER}.mlp", f"{_LAYER}.mlp.down_proj")
_OUTLIERS = "isolated-error-outlier"

WithDashboard = Annotated[
    bool, typer.Option("--dashboard/--no-dashboard", help="Open the dashboard afterwards.")
]


def demo(context: typer.Context, dashboard: WithDashboard = True, port: o.Port = 8501) -> None:
    """Find a planted fault in a real model.

    Succeeds exactly when it found what it planted.
    """
    session = Session.of(context)
    if dashboard:
        check_port(port, LOOPBACK)
    result = run_demo(session)
    Delivery(json=False, shown=None, files=None).deliver(result)
    differing = differences(result)
    for line in differing:
        whisper(f"demo: {line}")
    whisper("demo: " + ("not what was planted" if differing else "found what was planted"))
    if differing or not dashboard:
        raise typer.Exit(1 if differing else 0)
    serve(session.database_url(), port, config=session.find_config())


def run_demo(session: Session) -> "RunResult":
    """Run the shipped check `demo` and store it."""
    from quantwatch.config.load import load_config
    from quantwatch.pipeline import RunRequest
    from quantwatch.store.upgrade import upgrade

    upgrade(session.database_url())
    with as_file(files("quantwatch.config") / "demo.toml") as path:
        check = load_config(path).checks[CHECK]
        request = RunRequest(CHECK, check, path.parent, cache_dir())
        return execute(session, request, store=True, sure=True)


def differences(result: "RunResult") -> list[str]:
    """Return where a demo run departs from what was planted; empty when it found everything."""
    found = {c.name: str(c.verdict or f"failed ({c.failure})") for c in result.candidates}
    lines = [
        f"{name} is {found.get(name, 'not measured')}, planted: {wanted}"
        for name, wanted in _VERDICTS.items()
        if found.get(name) != wanted
    ]
    faulty = next((c for c in result.candidates if c.name == _FAULTY), None)
    culprit = faulty.culprit.scope if faulty is not None and faulty.culprit else None
    if culprit not in _CULPRITS:
        lines.append(f"{_FAULTY}'s culprit is {culprit}, planted: {_CULPRITS[-1]}")
    named = {(a.candidate, a.scope) for a in result.alerts if a.rule == _OUTLIERS}
    if named != {(_FAULTY, _LAYER)}:
        said = ", ".join(f"{scope} of {name}" for name, scope in sorted(named)) or "nothing"
        lines.append(f"rule {_OUTLIERS} names {said}, planted: {_LAYER} of {_FAULTY}")
    return lines
