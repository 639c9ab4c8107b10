"""`quantwatch kernels`: bounds, conformance, speed and tables of the kernels and recipes."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from quantwatch.cli import options as o
from quantwatch.cli import plan
from quantwatch.cli.session import Session

app = typer.Typer(help="Kernels and recipes: bounds, tests, speed, tables.", no_args_is_help=True)
app.add_typer(plan.app, name="plan")

Model = Annotated[str, typer.Option(help="Model folder, hub id, GGUF file, or smollm2-135m.")]
Recipes = Annotated[
    list[str] | None, typer.Option("--recipe", help="int8-channel, uint4-g64, … May be repeated.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A part of it, whose figures are as right.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads, pinned.")]
Operator = Annotated[str | None, typer.Option("--op", help="Only this operator.")]
Case = Annotated[
    str | None,
    typer.Option("--case", help="VARIANT/BACKEND/SHAPE/DTYPE/LAYOUT of a failure; not stored."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")]
Rounds = Annotated[int, typer.Option(min=5, help="Interleaved rounds per shape.")]
Seed = Annotated[int, typer.Option(help="Of the function-preserving rescale.")]
Text = Annotated[
    Path | None,
    typer.Option("--text", exists=True, dir_okay=False, help="Plain text; core-v1 when absent."),
]
Tasks = Annotated[
    Path | None,
    typer.Option(
        "--tasks", exists=True, dir_okay=False, help="Multiple choice, .jsonl; table memory only."
    ),
]
Windows = Annotated[int, typer.Option(min=2, help="Windows of 512 tokens of --text.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write it here: Markdown, or .json.")]
Folder = Annotated[Path, typer.Option("--out", help="Folder of the checkpoint; must not exist.")]
Source = Annotated[str, typer.Argument(metavar="MODEL", help="What to take off its grid.")]
Target = Annotated[float, typer.Option("--target-bpw", help="Bits per weight, all counted.")]
Formats = Annotated[str, typer.Option(help="Formats a layer may get, with commas.")]
TableFormats = Annotated[str, typer.Option("--embedding", help="… the embedding may get.")]
Method = Annotated[Literal["nearest", "gptq"], typer.Option(help="How layers are rounded.")]
Clip = Annotated[Literal["none", "mse"], typer.Option(help="mse: search each group's range.")]
Scales = Annotated[
    Literal["float32", "bfloat16", "float16"], typer.Option("--scale-dtype", help="Of scales.")
]
Detail = Annotated[
    Literal["linear", "part"],
    typer.Option(help="A format per linear layer, or per attention and MLP (quicker)."),
]
Probe = Annotated[str | None, typer.Option(help="The format whose KL is measured, others scaled.")]
CalibratedOn = Annotated[
    str, typer.Option("--calibrate-on", metavar="FILE|core-v1", help="Never what is measured.")
]
CalibrationWindows = Annotated[int, typer.Option(min=1, help="Windows of 512 of that file.")]
Tokens = Annotated[int, typer.Option(min=1, help="Of them, for sensitivities.")]
Allocating = Annotated[str, typer.Argument(metavar="MODEL", help="What to make a recipe for.")]
File = Annotated[Path, typer.Option("--out", dir_okay=False, help="The recipe: a .toml file.")]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Absent: list them.")]


@app.command("bounds")
def bounds(
    context: typer.Context, *, model: Model = "smollm2-135m", recipe: Recipes = None,
    quick: Quick = False, threads: Threads = 1, json: o.AsJson = False, out: Out = None,
) -> None:  # fmt: skip
    """Hold error bounds against real layers; exits with 1 when one is violated."""
    from quantwatch.cli import laboratory as lab

    session = Session.of(context, json=json)
    lab.pin(threads)
    lab.bounds(session, model, recipe, quick=quick, out=out)


@app.command("test")
def conform(
    context: typer.Context, *, op: Operator = None, case: Case = None, device: Device = "cpu",
    quick: Quick = False, threads: Threads = 1, store: o.Store = True, json: o.AsJson = False,
    out: Out = None,
) -> None:  # fmt: skip
    """Test every operator against its float64 twin; exits with 1 when a case fails."""
    from quantwatch.cli import laboratory as lab

    session = Session.of(context, json=json)
    lab.pin(threads)
    lab.conform(session, lab.Grid(op, device, quick, case), store=store, out=out)


@app.command("bench")
def bench(
    context: typer.Context, *, rounds: Rounds = 40, quick: Quick = False, threads: Threads = 1,
    store: o.Store = True, json: o.AsJson = False, out: Out = None,
) -> None:  # fmt: skip
    """Measure speed as a multiple of bfloat16 F.linear's, interleaved."""
    from quantwatch.cli import laboratory as lab

    session = Session.of(context, json=json)
    lab.pin(threads)
    lab.bench(session, rounds, quick=quick, store=store, out=out)


@app.command("table")
def table(
    context: typer.Context, name: Name = None, *, model: Model = "smollm2-135m",
    text: Text = None, windows: Windows = 8, tasks: Tasks = None, seed: Seed = 0,
    quick: Quick = False, threads: Threads = 1, json: o.AsJson = False, out: Out = None,
) -> None:  # fmt: skip
    """Measure a table anew, or list the tables."""
    from quantwatch.cli import laboratory as lab

    session = Session.of(context, json=json)
    if name is None:
        return lab.tables(session)
    lab.pin(threads)
    request = lab.request(model, (text, tasks), windows, seed, quick)
    return lab.table(session, name, request, out=out)


@app.command("allocate")
def allocate(
    context: typer.Context, model: Allocating, *, target_bpw: Target, out: File,
    text: Text = None, windows: Windows = 8, calibrate_on: CalibratedOn = "core-v1",
    calibration_windows: CalibrationWindows = 16, tokens: Tokens = 1024,
    formats: Formats = "uint3-g64,uint4-g64,uint5-g64,uint6-g64,int8-channel",
    embedding: TableFormats = "uint4-g64,uint5-g64,uint6-g64,int8-channel",
    detail: Detail = "linear", probe: Probe = None, method: Method = "gptq", clip: Clip = "mse",
    scale_dtype: Scales = "float16", threads: Threads = 1, json: o.AsJson = False,
) -> None:  # fmt: skip
    """Write a recipe with a format per layer that fits into so many bits per weight."""
    from quantwatch.cli import allocating as run
    from quantwatch.cli import laboratory as lab

    session = Session.of(context, json=json)
    how = {"method": method, "clip": clip, "scale_dtype": scale_dtype, "detail": detail}
    wish = run.wanted(target_bpw, formats, embedding, probe, **how)
    lab.pin(threads)
    texts = run.Texts(text, windows, calibrate_on, calibration_windows, tokens)
    run.allocate(session, model, wish, texts, out)


@app.command("off-grid")
def off_grid(
    context: typer.Context, model: Source, out: Folder, seed: Seed = 0, threads: Threads = 1
) -> None:
    """Write a checkpoint that computes the same and lies on no quantization grid."""
    from quantwatch.cli import laboratory as lab

    Session.of(context)
    lab.pin(threads)
    lab.off_grid(model, out, seed)
