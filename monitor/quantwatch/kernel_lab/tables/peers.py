"""Whether a table was measured as the peers' figures were: then they, and the bars, may be shown.

Both belong to one protocol: SmolLM2-135M-Instruct off its 4-bit grid on 8 windows of WikiText-2's
test text. What was measured is told by the model's name and the reference's perplexity, so that no
figure is held against another text's.
"""

from quantwatch.kernel_lab.measure import Figures
from quantwatch.kernel_lab.tables.model import TableRequest

PEERS_PPL = 24.498
_PEERS_MODEL, _PEERS_WITHIN = "smollm2-135m", 0.005


def is_peers(request: TableRequest, figures: Figures) -> bool:
    """Return whether these figures may be held against the peers' and the bars."""
    near = abs(figures.ppl_reference - PEERS_PPL) < _PEERS_WITHIN
    return request.model == _PEERS_MODEL and near


def not_peers_note(what: str) -> str:
    """Say why `what` isn't shown."""
    return (
        f"{what} belong to {_PEERS_MODEL} on 8 windows of WikiText-2 "
        f"(reference PPL {PEERS_PPL}); this is something else, so they aren't shown"
    )
