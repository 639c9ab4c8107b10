"""Options and arguments of the commands, declared once so that a signature stays readable."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from quantwatch.config.lens import Products as _Products

Format = Literal["md", "html", "junit", "json"]
Dtype = Literal["float32", "bfloat16", "float16"]
Execution = Literal["dequantized", "aten", "reference"]
_MODEL = "Model folder, hub id, GGUF file, or smollm2-135m."

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
AsFormat = Annotated[Format | None, typer.Option("--format", help="Format of the report.")]
Output = Annotated[
    list[Path] | None,
    typer.Option(help="Write the report here; format by --format or suffix. May be repeated."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first N prompts.")]
Yes = Annotated[bool, typer.Option("--yes", help="Run although the estimate exceeds free memory.")]
Store = Annotated[bool, typer.Option("--store/--no-store", help="Keep the run in the database.")]
RunId = Annotated[str, typer.Argument(help='Run id, a unique start of one, a check, or "latest".')]
Check = Annotated[str, typer.Argument(metavar="CHECK", help="Name of a check.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port of the dashboard.")]
Address = Annotated[str, typer.Option(help="Address the dashboard listens on.")]

Reference = Annotated[str, typer.Argument(metavar="REF", help=f"The model that is right. {_MODEL}")]
Candidate = Annotated[str, typer.Argument(metavar="CAND", help=f"The model to judge. {_MODEL}")]
Texts = Annotated[
    list[Path],
    typer.Option(
        "--text", exists=True, dir_okay=False, help="Plain text, JSON or JSONL. May be repeated."
    ),
]
Recipe = Annotated[str | None, typer.Option(help="Quantize CAND: int8-channel, int4-g64, …")]
Window = Annotated[int, typer.Option(min=2, help="Tokens per window of plain text.")]
ScoreStart = Annotated[int, typer.Option(min=0, help="First scored position of every window.")]
ReferenceDtype = Annotated[Dtype, typer.Option(help="Computing dtype of REF.")]
CandidateDtype = Annotated[Dtype | None, typer.Option(help="… of CAND; REF's when absent.")]
Executed = Annotated[Execution, typer.Option(help="How a --recipe is computed.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]
Recorded = Annotated[
    bool,
    typer.Option("--reference-cache", help="Record REF's hidden states, or read them again."),
]
Spread = Annotated[
    Literal["inline", "local", "ray"], typer.Option(help="Who measures the batches.")
]
Shards = Annotated[int | None, typer.Option(min=1, help="Processes of --executor local or ray.")]
Chunk = Annotated[
    int | None, typer.Option("--prefill-chunk", min=1, help="Longer prompts go in such chunks.")
]
Products = Annotated[
    _Products,
    typer.Option("--lens-products", help="int16, bfloat16: faster lenses, of rounded factors."),
]
Beyond = Annotated[
    bool, typer.Option("--allow-beyond-context", help="Measure prompts beyond the context.")
]
