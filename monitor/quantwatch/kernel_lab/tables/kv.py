"""What a quantized KV cache costs: KL by scheme, bits per cached number, capacity.

Windows of 512 tokens: the first 384 come at once, then one token at a time (in one pass that reads
what such a loop would, `serve.kv_single_pass`); the last 128 tokens are scored. Prompts of core-v1,
which are shorter, come one token at a time. The model is the
reference in float32 itself, so that nothing but the cache differs. Bits count codes, scales, zero
points, low-rank products and what stays in full precision as 16 bits, for a sequence of 512 tokens;
capacity is that of a bfloat16 cache without sinks and window, 16 ÷ bits of what is stored.

On llama.cpp's windows (the second half scored) its q8_0 and q4_0 caches are beside two schemes; its
figures belong to that text and model alone.
"""

from dataclasses import dataclass

from quantwatch.kernel_lab.measure import Figures, Yardstick
from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables.model import Cell, Column, Rows, Table, TableRequest
from quantwatch.kernel_lab.tables.peers import is_peers, not_peers_note
from quantwatch.kernel_lab.texts import WINDOW
from quantwatch.models.loaded import LoadedModel
from quantwatch_kernels.serve.kv_scheme import SCHEMES, KVScheme
from quantwatch_kernels.serve.kv_single_pass import head_features, quantized_kv

_PREFILL, _LAST = 384, 128
_WINDOWS = 16
"""At least so many windows of a text are measured: the protocol of the bars."""
_COLUMNS = (
    Column("scheme", "scheme"),
    Column("windows", "measured on"),
    Column("bits", "bits per cached number", ".3f"),
    Column("capacity", "capacity without window, × bf16", ".2f"),
    Column("kl", "mean KL, nats", ".5f"),
    Column("kl_se", "± se", ".5f"),
    Column("kl_p99", "p99", ".4f"),
    Column("same_top1", "same top-1", ".1%"),
    Column("ppl", "PPL", ".3f"),
    Column("peer", "llama.cpp's cache"),
    Column("peer_kl", "its mean KL", ".5f"),
    Column("reach", "to reach", ".5f"),
    Column("reached", "reached"),
)
REACH = {"int8-centered": 0.0001, "int4-centered": 0.0045, "int2": 0.08}
"""On 16 windows of WikiText-2's test text, SmolLM2-135M."""


@dataclass(frozen=True, slots=True)
class _Peer:
    name: str
    kl: float


PEERS = {
    "int8-centered": _Peer("q8_0, rotated", 0.00021),
    "int4-centered": _Peer("q4_0, rotated", 0.0395),
}
"""Keys and values alike; half of their KL is to be reached (peer_figures.md)."""


def build(request: TableRequest) -> Table:
    """Measure each scheme; with `quick` three of them on fewer windows."""
    loaded = load_reference(request.model, request.cache_dir, off_grid_seed=None)
    windows = request.windows and max(request.windows, _WINDOWS)
    windows = 2 if request.quick else windows
    measured = yardstick(loaded, request.text, windows=windows, last=_LAST)
    prefill = 0 if request.text is None else _PREFILL
    rows = Rows(_COLUMNS, request.tell)
    for name in ("int8", "int4", "kivi2") if request.quick else SCHEMES:
        request.tell(name)
        figures = through(measured, SCHEMES[name], prefill)
        reach = REACH.get(name) if request.model == "smollm2-135m" else None
        rows.add(name, measured.text.name, *_row(loaded, SCHEMES[name], figures, None, reach))
    comparable = request.text is not None and not request.quick
    if comparable:
        comparable = _beside_peers(request, loaded, rows)
    return Table("KV caches", _COLUMNS, tuple(rows), _notes(request, measured, comparable))


def through(measured: Yardstick, scheme: KVScheme, prefill: int) -> Figures:
    """Measure the reference's own weights through a cache of this scheme."""
    with quantized_kv(measured.module, scheme, prefill):
        return measured.measure(measured.module)


def _beside_peers(request: TableRequest, loaded: LoadedModel, rows: Rows) -> bool:
    """Add the rows on llama.cpp's windows; says whether these are its text and model."""
    measured = yardstick(loaded, request.text, windows=8)
    comparable = False
    for name, peer in PEERS.items():
        request.tell(f"{name}, second halves")
        figures = through(measured, SCHEMES[name], 0)
        comparable = is_peers(request, figures)
        row = _row(loaded, SCHEMES[name], figures, peer if comparable else None, None)
        rows.add(name, "8 windows, second halves", *row)
    return comparable


def _row(
    loaded: LoadedModel,
    scheme: KVScheme,
    figures: Figures,
    peer: _Peer | None,
    reach: float | None,
) -> tuple[Cell, ...]:
    features = head_features(loaded.module)
    stored = sum(p.num_bits(scheme.flush * 8, features) for p in (scheme.keys, scheme.values))
    goal = peer.kl / 2 if peer is not None else reach
    return (
        scheme.bits_per_element(WINDOW, features),
        16 * 2 * 8 * scheme.flush * features / stored,
        *(figures.kl, figures.kl_se, figures.kl_p99, figures.same_top1, figures.ppl),
        *((None, None) if peer is None else (peer.name, peer.kl)),
        goal,
        None if goal is None else figures.kl <= goal,
    )


def _notes(request: TableRequest, measured: Yardstick, comparable: bool) -> tuple[str, ...]:
    return (
        f"{request.model} in float32 as it is, {measured.text.name}, {len(measured.text.windows)} "
        f"windows or prompts, {measured.text.num_scored} scored tokens; of a window of a text the "
        f"first {_PREFILL} tokens come at once",
        "± se: clustered by window, of the difference to the same model with a full cache",
        *(() if comparable else (not_peers_note("llama.cpp's figures"),)),
    )
