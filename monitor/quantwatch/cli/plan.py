"""`quantwatch kernels plan`: what measured samples say about batch, split, offload and bounds."""

from pathlib import Path
from typing import Annotated, Any

import typer

from quantwatch.cli import options as o
from quantwatch.cli.session import Session

app = typer.Typer(help="Plans from measured samples: what to serve, and how.", no_args_is_help=True)

_FILE: Any = {"exists": True, "dir_okay": False}
Shapes = Annotated[
    Path, typer.Argument(metavar="SAMPLES", help="CSV: batch,length,tokens,seconds.", **_FILE)
]
Collectives = Annotated[
    Path, typer.Argument(metavar="SAMPLES", help="CSV: collective,devices,bytes,seconds.", **_FILE)
]
Moved = Annotated[Path, typer.Argument(metavar="SAMPLES", help="CSV: at_s,bytes,seconds.", **_FILE)]
Copies = Annotated[
    Path, typer.Option("--peak", help="CSV of copies that show the peak: bytes,seconds.", **_FILE)
]
Plan = Annotated[Path, typer.Argument(metavar="PLAN", help="TOML: tiers, links, groups.", **_FILE)]
Profile = Annotated[
    Path, typer.Argument(metavar="PROFILE", help="ncu --csv, or a torch trace (.json).", **_FILE)
]
Out = Annotated[Path | None, typer.Option("--out", help="Write it here: Markdown, or .json.")]
Layers = Annotated[int, typer.Option(help="Decoder layers.")]
KVHeads = Annotated[int, typer.Option(help="KV heads.")]
HeadDim = Annotated[int, typer.Option(help="Channels per head.")]
KVBits = Annotated[int, typer.Option(help="Bits of a KV element.")]
ScaleBits = Annotated[int, typer.Option(help="Bits of a scale, per token and head.")]
ZeroBits = Annotated[int, typer.Option(help="Bits of a zero point, per token and head.")]
PageTokens = Annotated[int, typer.Option(help="Tokens of a page.")]
Budget = Annotated[str | None, typer.Option(help='Of the KV cache, as "8 GiB" or "8 GB".')]
Epsilon = Annotated[float, typer.Option(help="Keep few, at most this share worse than any.")]
LengthCounts = Annotated[bool, typer.Option("--length-counts", help="A longer context is a goal.")]
Devices = Annotated[int, typer.Option(help="Equal devices.")]
Hidden = Annotated[int, typer.Option(help="Hidden size.")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
Intermediate = Annotated[int, typer.Option(help="Inner size of the MLP.")]
WeightBytes = Annotated[float, typer.Option(help="Bytes per weight, scales counted.")]
Tokens = Annotated[str, typer.Option(help="Tokens per step, with commas.")]
Rate = Annotated[float, typer.Option("--gb-per-s", help="Memory, measured, GB/s of 10⁹ bytes.")]
Flops = Annotated[float, typer.Option("--gflop-per-s", help="Matrix products, measured.")]
Above = Annotated[float, typer.Option(help="Share of the measured peak.")]
InARow = Annotated[int, typer.Option("--samples", help="Consecutive samples above it.")]
NoOverlap = Annotated[bool, typer.Option("--no-overlap", help="Moves don't hide behind computing.")]
Threshold = Annotated[float, typer.Option(help="Below this share of both ceilings: latency.")]


@app.command("pareto")
def pareto(
    context: typer.Context, samples: Shapes, *, layers: Layers, kv_heads: KVHeads,
    head_dim: HeadDim, kv_bits: KVBits = 16, scale_bits: ScaleBits = 0, zero_bits: ZeroBits = 0,
    page_tokens: PageTokens = 16, budget: Budget = None, epsilon: Epsilon = 0.0,
    length_counts: LengthCounts = False, json: o.AsJson = False, out: Out = None,
) -> None:  # fmt: skip
    """Compare batch × length: throughput, latency, exact KV bytes."""
    from quantwatch.cli import planning

    session = Session.of(context, json=json)
    shape = (layers, kv_heads, head_dim, kv_bits, scale_bits, zero_bits, page_tokens)
    found = planning.pareto(samples, shape, budget, epsilon, length_counts=length_counts)
    planning.deliver(session, found, out)


@app.command("parallel")
def parallel(
    context: typer.Context, samples: Collectives, *, devices: Devices, hidden: Hidden,
    heads: Heads, kv_heads: KVHeads, head_dim: HeadDim, intermediate: Intermediate,
    gb_per_s: Rate, gflop_per_s: Flops, weight_bytes: WeightBytes = 2.0,
    tokens: Tokens = "1,8,64,512,4096", json: o.AsJson = False, out: Out = None,
) -> None:  # fmt: skip
    """Compare tensor with sequence parallel on measured links."""
    from quantwatch.cli import planning

    session = Session.of(context, json=json)
    sizes = (hidden, heads, kv_heads, head_dim, intermediate, weight_bytes)
    ceilings = planning.ceilings(gb_per_s, gflop_per_s)
    planning.deliver(session, planning.parallel(samples, sizes, ceilings, devices, tokens), out)


@app.command("offload")
def offload(
    context: typer.Context, plan: Plan, *, no_overlap: NoOverlap = False, json: o.AsJson = False,
    out: Out = None,
) -> None:  # fmt: skip
    """Place weights, KV pages and activations on tiers of memory."""
    from quantwatch.cli import planning
    from quantwatch.kernel_lab.plan_offload import offload_table

    session = Session.of(context, json=json)
    planning.deliver(session, offload_table(plan, overlap=not no_overlap), out)


@app.command("bandwidth")
def bandwidth(
    context: typer.Context, samples: Moved, *, peak: Copies, above: Above = 0.82,
    in_a_row: InARow = 5, json: o.AsJson = False, out: Out = None,
) -> None:  # fmt: skip
    """Find when memory bandwidth was the bottleneck."""
    from quantwatch.cli import planning

    session = Session.of(context, json=json)
    planning.deliver(session, planning.bandwidth(samples, peak, above, in_a_row), out)


@app.command("roofline")
def roofline(
    context: typer.Context, profile: Profile, *, gb_per_s: Rate, gflop_per_s: Flops,
    threshold: Threshold = 0.6, json: o.AsJson = False, out: Out = None,
) -> None:  # fmt: skip
    """Say of each kernel whether memory, arithmetic or latency bounds it."""
    from quantwatch.cli import planning
    from quantwatch.kernel_lab.plan_tables import roofline_table

    session = Session.of(context, json=json)
    found = roofline_table(profile, planning.ceilings(gb_per_s, gflop_per_s), threshold)
    planning.deliver(session, found, out)
