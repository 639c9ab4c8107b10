"""States in which a database may be when somebody opens a page: bad input, as issue 5 lists it."""

import math
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from sqlalchemy import update
from tests.dashboard.invented import START, Candidate, Spec
from tests.dashboard.invented_actions import furnish
from tests.dashboard.invented_kernels import EVIL, fill_kernels
from tests.dashboard.invented_runs import save, save_ended

from quantwatch.domain import RunStatus, Verdict
from quantwatch.store import runs
from quantwatch.store.schema import REVISIONS
from quantwatch.store.session import open_database
from quantwatch.store.tables import RunRow

RUN = "01JS" + "0" * 22
ONE = (Candidate("only", 1e-2),)
HOSTILE = (
    "<script>alert(1)</script>", "$x$", ":red[y]", "[x](javascript:alert(1))", "**b**",
    "<img src=x onerror=alert(1)>",
)  # fmt: skip
BAD = (
    Candidate("exact", 0.0),
    Candidate("broken", 0.0, None, failure="weights are corrupt: <b>bad</b> magic"),
    Candidate("nan", math.nan, Verdict.REGRESSION, nan_layer=0),
)
Build = Callable[[str, Path], object]


@dataclass(frozen=True)
class State:
    """A database and an address; `said` is what each page says then, `on` what one says instead."""

    build: Build | None = None
    """Fills an empty database of today's schema."""
    url: str | None = None
    """Names a database that is not made."""
    query: Mapping[str, str] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _spec(**values: object) -> Spec:
    usual = {"run_id": RUN, "candidates": ONE, "num_prompts": 1, "num_layers": 2}
    return Spec(**(usual | values))  # type: ignore[arg-type]


def _saved(**values: object) -> Build:
    return lambda url, folder: save(url, _spec(**values), folder)


def _twice(**values: object) -> Build:
    """Save two runs, so that there is a pair to compare."""

    def build(url: str, folder: Path) -> None:
        save(url, _spec(**values), folder)
        later = {"run_id": RUN[:-1] + "1", "started_at": START + timedelta(days=1), "drift": 1.1}
        save(url, _spec(**values, **later), folder)

    return build


def _hostile(url: str, folder: Path) -> None:
    names = tuple(Candidate(name, 1e-2, Verdict.REGRESSION) for name in (HOSTILE[0], "n" * 300))
    save(url, _spec(check="demo", candidates=names, pieces=HOSTILE, num_prompts=2), folder)
    save_ended(url, _spec(check=f":red[c]{EVIL}", run_id="01JX"), RunStatus.FAILED, EVIL)
    fill_kernels(url)
    furnish(url)


def _going(url: str, folder: Path) -> None:
    database = open_database(url)
    runs.begin_run(database, run_id=RUN, check="demo", config={}, started_at=START)
    runs.advance_run(database, RUN, RunStatus.MEASURING)
    with database.writer() as session:
        done = {"stage": "int8 <b>", "tokens_done": 30, "tokens_total": 120}
        session.execute(update(RunRow).values(**done))
    database.close()


def _failed(url: str, folder: Path) -> None:
    save_ended(url, _spec(), RunStatus.FAILED, "disk full: 12 MB free <b>")


def _schema(revision: str) -> Build:
    def build(url: str, folder: Path) -> None:
        with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
            connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))

    return build


def _no_tables(url: str, folder: Path) -> None:
    Path(url.removeprefix("sqlite:///")).write_bytes(b"")


_UNREADABLE = "The database can&#x27;t be read"
_LOST = "<script>alert(1)</script>"
_NOWHERE = dict.fromkeys(
    ("check", "run", "run_a", "alert", "candidate", "prompt", "metric", "place", "position", "layer",
     "token", "op", "backend", "batch", "device", "part", "show", "state", "sort", "page", "from"),
    _LOST,
)  # fmt: skip
_QUIET = {
    "alerts": ("No open alert",),
    "kernels": ("No kernel has been tested yet", "kernels test --quick", "kernels bench"),
    "operations": ("No service has been seen",),
}
"""What these pages say where there are runs and nothing else."""
_NO_PAIR = {"compare": ("No run has succeeded yet",)}
_BAD = {
    "run": ("weights are corrupt: &lt;b&gt;bad&lt;/b&gt; magic", "Not finite from layers.0 on"),
    "check": ("Not finite from layers.0 on", "could not be loaded"),
    "alerts": ("values are not finite",),
}

STATES = {
    "empty": State(said=("No check has run yet", "quantwatch --database {url} demo --no-dashboard"),
                   on={name: _QUIET[name] for name in ("kernels", "operations")}),
    "missing": State(url="sqlite:///{folder}/gone.db", said=(_UNREADABLE, "does not exist yet")),
    "unreachable": State(url="postgresql://quantwatch:hunter2@127.0.0.1:1/db",
                         said=(_UNREADABLE, "reached")),
    "unsupported": State(url="mysql://root:hunter2@localhost/x", said=("not allowed",)),
    "no tables": State(_no_tables, said=(_UNREADABLE, "quantwatch db upgrade")),
    "older schema": State(_schema(REVISIONS[-2]), said=(_UNREADABLE, "of an older quantwatch")),
    "newer schema": State(_schema("9999"), said=(_UNREADABLE, "of a newer quantwatch")),
    "one run": State(_saved(), on=_QUIET, said=("only",)),
    "one layer": State(_twice(num_layers=1), on=_QUIET, said=("only",)),
    "126 layers": State(_twice(num_layers=126), on=_QUIET, said=("only",)),
    "30,000 tokens": State(_twice(num_tokens=30_000), on=_QUIET, said=("only",)),
    "all NaN": State(_saved(candidates=BAD), on=_QUIET | _BAD, said=("nan",)),
    "going": State(_going, on=_QUIET | _NO_PAIR, said=("25 %",)),
    "failed": State(_failed, on=_QUIET | _NO_PAIR, said=("disk full: 12 MB free &lt;b&gt;",)),
    "hostile": State(_hostile, on={"alerts": ("1 alert open",), "operations": ("in quarantine",)},
                     said=("&lt;script&gt;",)),
    "lost address": State(_hostile, query=_NOWHERE, said=("That is not in this database",),
                          on={"overview": ("<h1>",), "kernels": ("<h1>",), "operations": ("Parts of",)}),
}  # fmt: skip


def make(state: State, migrated: Path, folder: Path) -> str:
    """Make a database in a state; return its URL."""
    if state.url is not None:
        return state.url.format(folder=folder)
    url = f"sqlite:///{shutil.copy(migrated, folder / 'quantwatch.db')}"
    if state.build is not None:
        state.build(url, folder)
    return url
