"""What the commands of `quantwatch kernels` do with what the laboratory returns."""

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import typer

from quantwatch.cli.output import show_json
from quantwatch.cli.session import Session, cache_dir
from quantwatch.cli.streams import say, whisper
from quantwatch.errors import UserError
from quantwatch.kernel_lab.tables.model import Table, TableRequest, to_json, to_markdown
from quantwatch.telemetry import check_writable, write_whole

VIOLATED = 1
"""Exit code when a bound or a case fails, as a regression's."""


class Grid(NamedTuple):
    """What part of the conformance grid is run."""

    operator: str | None
    device: str
    quick: bool
    case: str | None = None
    """One case by its name: it is not stored, so that it never stands for its operator."""


def pin(threads: int) -> None:
    """Pin the CPU threads: two threads on busy cores cost five times as much."""
    import torch

    torch.set_num_threads(threads)


def deliver(session: Session, table: Table, out: Path | None) -> None:
    """Write a table to a file, or to stdout: Markdown, or JSON with --json or a .json suffix."""
    if out is not None:
        as_json = out.suffix == ".json"
        write_whole(out, _json(table) if as_json else to_markdown(table))
        whisper(f"wrote {out}")
    if session.json:
        show_json(to_json(table))
    elif out is None:
        say(to_markdown(table))


def _json(table: Table) -> str:
    from quantwatch.report.document import dumps

    return dumps(to_json(table))


def bounds(
    session: Session, model: str, recipes: list[str] | None, *, quick: bool, out: Path | None
) -> None:
    """Run `kernels bounds`."""
    from quantwatch.kernel_lab.bound_tables import bounds_of, summary

    check_out(out)
    try:
        rows = bounds_of(model, cache_dir(), recipes, quick=quick)
    except ValueError as error:
        raise UserError(str(error)) from error
    deliver(session, summary(rows), out)
    violated = [
        f"{row.format} {row.scope}: {'; '.join(row.problems)}" for row in rows if row.problems
    ]
    for line in violated:
        whisper(line)
    if violated:
        raise typer.Exit(VIOLATED)


def conform(session: Session, grid: Grid, *, store: bool, out: Path | None) -> None:
    """Run `kernels test`."""
    from quantwatch.kernel_lab.conformance import run_conformance, summary
    from quantwatch.store.kernels import insert_cases

    check_out(out)
    batch, cases = run_conformance(
        operator=grid.operator, case=grid.case, device=grid.device, quick=grid.quick, tell=whisper
    )
    if store and grid.case is None:
        with session.writer() as database:
            insert_cases(database, batch, cases)
        whisper(f"stored as batch {batch.id}")
    deliver(session, summary(cases), out)
    for case in (case for case in cases if case.status == "failed"):
        whisper(f"failed: --op {case.operator} --case {case.name!r}: {case.message}")
    if batch.num_failed:
        raise typer.Exit(VIOLATED)


def bench(session: Session, rounds: int, *, quick: bool, store: bool, out: Path | None) -> None:
    """Run `kernels bench`."""
    from quantwatch.kernel_lab.bench import run_bench
    from quantwatch.kernel_lab.conformance import batch_of
    from quantwatch.kernel_lab.speed_table import speeds_table
    from quantwatch.store.kernels import insert_speeds

    check_out(out)
    started = datetime.now(UTC)
    speeds = run_bench(rounds=rounds, quick=quick, tell=whisper)
    if store:
        batch = batch_of("bench", "cpu", started)
        with session.writer() as database:
            insert_speeds(database, batch, speeds)
        whisper(f"stored as batch {batch.id}")
    deliver(session, speeds_table(speeds), out)


def request(
    model: str, texts: tuple[Path | None, Path | None], windows: int, seed: int, quick: bool
) -> TableRequest:
    """Return what a table is made of; `texts` are the measured one and multiple-choice items."""
    text, tasks = texts
    return TableRequest(
        cache_dir(), model, text, windows, seed, quick=quick, tell=whisper, tasks=tasks
    )


def tables(session: Session) -> None:
    """List the tables."""
    from quantwatch.kernel_lab.tables.registry import TABLES

    if session.json:
        show_json([{"name": name, "shows": entry.shows} for name, entry in TABLES.items()])
    else:
        say("".join(f"{name:<14}{entry.shows}\n" for name, entry in TABLES.items()))


def table(session: Session, name: str, wanted: TableRequest, *, out: Path | None) -> None:
    """Run `kernels table NAME`."""
    from quantwatch.kernel_lab.tables.registry import build

    check_out(out)
    deliver(session, build(name, wanted), out)


def off_grid(model: str, out: Path, seed: int) -> None:
    """Run `kernels off-grid MODEL`."""
    from quantwatch.kernel_lab.references import write_off_grid

    try:
        layers = write_off_grid(model, cache_dir(), out, seed)
    except ValueError as error:
        raise UserError(f"{model}: {error}") from error
    say(f"wrote {out}: {layers} layers rescaled, seed {seed}\n")


def check_out(out: Path | None) -> None:
    """Refuse a path that can't be written before an hour is spent."""
    if out is None:
        return
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.absolute().parent}")
    check_writable(out)
