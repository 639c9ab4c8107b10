"""What a quantized KV cache costs: KL by scheme, bits per cached number, capacity.

Windows of 512 tokens, the last 128 scored, twice:

- *mean KL* as published figures are measured: 384 tokens come at once and then 128 at once; each
  part sees itself in full precision and is stored afterwards, so the scored tokens read codes of
  the 384 and of nothing else (KIVI, GEAR, transformers' cache; kernel_anchors.md §1.9).
- *as served*: 384 tokens at once, then one token at a time, each stored before it is attended to,
  so codes are read everywhere and errors pile up, as in a paged server.

Both in one pass that reads what such a loop would (`serve.kv_single_pass`). Prompts of core-v1,
which are shorter, come one token at a time in both. The model is the reference in float32
itself, so that nothing but the cache differs. Bits count codes, scales, zero points, low-rank
products, gains, bounds and fetched pages, and what stays in full precision as 16 bits, for a
sequence of 512 tokens, all layers; capacity is that of a bfloat16 cache without sinks, window and
high layers, 16 ÷ bits of what is stored. Gains are calibrated on later windows (or other prompts).

Bars (`kv_rows.bar`) are shown for SmolLM2-135M on a text of 16 windows or more, for every scheme of
their kind.

On llama.cpp's windows (the second half scored) its q8_0 and q4_0 caches are beside two schemes; its
figures belong to that text and model alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quantwatch.kernel_lab.measure import Figures, Yardstick
from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables.kv_rows import COLUMNS, NAMES, PEERS, QUICK, KVPeer, bar, bits
from quantwatch.kernel_lab.tables.model import Cell, Rows, Table, TableRequest
from quantwatch.kernel_lab.tables.peers import is_peers, not_peers_note
from quantwatch.kernel_lab.texts import calibration_text
from quantwatch.models.loaded import LoadedModel
from quantwatch_kernels.serve.kv_gain import KVGains
from quantwatch_kernels.serve.kv_policy import KVScheme
from quantwatch_kernels.serve.kv_reads import Arrivals
from quantwatch_kernels.serve.kv_scheme import scheme_named
from quantwatch_kernels.serve.kv_single_pass import calibrate_gains, quantized_kv

_PREFILL, _LAST = 384, 128
_WINDOWS = 16
"""At least so many windows of a text are measured: the protocol of the bars."""
_CALIBRATION = 8
PUBLISHED, SERVED = Arrivals(_PREFILL, _LAST, "exact"), Arrivals(_PREFILL)
_SINGLY_EXACT, _SINGLY = Arrivals(own="exact"), Arrivals()
"""For prompts of core-v1."""


@dataclass(frozen=True, slots=True)
class _Lab:
    """What all rows share."""

    loaded: LoadedModel
    measured: Yardstick
    request: TableRequest

    def gains(self, scheme: KVScheme) -> KVGains | None:
        """Calibrate on windows after those that are measured, or on the other prompts."""
        if not scheme.gain:
            return None
        text = self.request.text
        skip = len(self.measured.text.windows) if text is not None else 0
        texts = calibration_text(self.loaded.tokenizer, text, skip=skip, windows=_CALIBRATION)
        return calibrate_gains(self.measured.module, scheme, texts)


def build(request: TableRequest) -> Table:
    """Measure each scheme; with `quick` a few of them on fewer windows."""
    loaded = load_reference(request.model, request.cache_dir, off_grid_seed=None)
    windows = request.windows and max(request.windows, _WINDOWS)
    windows = 2 if request.quick else windows
    measured = yardstick(loaded, request.text, windows=windows, last=_LAST)
    lab = _Lab(loaded, measured, request)
    protocols = (PUBLISHED, SERVED) if request.text is not None else (_SINGLY_EXACT, _SINGLY)
    barred = request.model == "smollm2-135m" and request.text is not None and not request.quick
    rows = Rows(COLUMNS, request.tell)
    for name in QUICK if request.quick else NAMES:
        request.tell(name)
        scheme = scheme_named(name)
        gains = lab.gains(scheme)
        figures, served = (through(measured, scheme, how, gains) for how in protocols)
        stored = bits(loaded, scheme)
        row = _row(stored, figures, None, bar(scheme, stored["bits"]) if barred else None)
        rows.add(name, measured.text.name, *row, served.kl, served.kl_se)
    comparable = request.text is not None and not request.quick
    if comparable:
        comparable = _beside_peers(request, loaded, rows)
    return Table("KV caches", COLUMNS, tuple(rows), _notes(request, measured, comparable))


def through(
    measured: Yardstick, scheme: KVScheme, arrivals: Arrivals, gains: KVGains | None = None
) -> Figures:
    """Measure the reference's own weights through a cache of this scheme."""
    with quantized_kv(measured.module, scheme, arrivals, gains):
        return measured.measure(measured.module)


def _beside_peers(request: TableRequest, loaded: LoadedModel, rows: Rows) -> bool:
    """Add the rows on llama.cpp's windows; says whether these are its text and model."""
    measured = yardstick(loaded, request.text, windows=8)
    comparable = False
    for name, peer in PEERS.items():
        request.tell(f"{name}, second halves")
        scheme = scheme_named(name)
        figures = through(measured, scheme, _SINGLY)
        comparable = is_peers(request, figures)
        row = _row(bits(loaded, scheme), figures, peer if comparable else None, None)
        rows.add(name, "8 windows, second halves, one by one", *row, None, None)
    return comparable


def _row(
    stored: Mapping[str, float], figures: Figures, peer: KVPeer | None, reach: float | None
) -> tuple[Cell, ...]:
    goal = peer.kl / 2 if peer is not None else reach
    return (
        *(stored["bits"], stored["host"] or None, stored["capacity"]),
        *(figures.kl, figures.kl_se, figures.kl_p99, figures.same_top1, figures.ppl),
        *((None, None) if peer is None else (peer.name, peer.kl)),
        goal,
        None if goal is None else figures.kl <= goal,
    )


def _notes(request: TableRequest, measured: Yardstick, comparable: bool) -> tuple[str, ...]:
    return (
        f"{request.model} in float32 as it is, {measured.text.name}, {len(measured.text.windows)} "
        f"windows or prompts, {measured.text.num_scored} scored tokens; mean KL: {_PREFILL} tokens "
        f"and then {_LAST} come at once, each part in full precision for itself; as served: "
        "after the prefill one by one, codes everywhere",
        "± se: clustered by window, of the difference to the same model with a full cache",
        *(() if comparable else (not_peers_note("llama.cpp's figures"),)),
    )
