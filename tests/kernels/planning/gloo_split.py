"""One of two processes that split a decoder layer; prints how far the parts are from the whole.

Run as `gloo_split.py RANK STORE`. float64, causal grouped-query attention and a gated MLP with a
bias behind the down projection, which must be added once. Odd token count: uneven shards.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from quantwatch_kernels.planning.parallel import all_reduce_cost, token_shards

HIDDEN, HEADS, KV_HEADS, DIM, INNER, TOKENS, RANKS = 24, 4, 2, 6, 20, 5, 2


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {
        "q": (HEADS * DIM, HIDDEN), "k": (KV_HEADS * DIM, HIDDEN), "v": (KV_HEADS * DIM, HIDDEN),
        "o": (HIDDEN, HEADS * DIM), "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN),
        "down": (HIDDEN, INNER), "bias": (HIDDEN,), "x": (TOKENS, HIDDEN),
    }  # fmt: skip
    return {
        n: torch.randn(*s, generator=generator, dtype=torch.float64) / 4 for n, s in shapes.items()
    }


def heads_of(rows: Tensor) -> Tensor:
    """[tokens, heads · dim] → [heads, tokens, dim]."""
    return rows.view(len(rows), -1, DIM).transpose(0, 1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [heads, tokens, dim]; returns [tokens, heads · dim]."""
    out = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, enable_gqa=True
    )
    return out[0].transpose(0, 1).flatten(1)


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(x @ gate.T) * (x @ up.T)


def whole(w: dict[str, Tensor]) -> Tensor:
    x = w["x"]
    a = x + attend(*(heads_of(x @ w[n].T) for n in "qkv")) @ w["o"].T
    return a + gated(a, w["gate"], w["up"]) @ w["down"].T + w["bias"]


def tensor_parallel(w: dict[str, Tensor], rank: int) -> tuple[Tensor, float]:
    """Heads and inner columns are split; two sums. Returns the result and the bytes sent."""
    rows = {n: w[n].chunk(RANKS, 0)[rank] for n in ("q", "k", "v", "gate", "up")}
    columns = {n: w[n].chunk(RANKS, 1)[rank] for n in ("o", "down")}
    sent = 0.0

    def summed(part: Tensor) -> Tensor:
        nonlocal sent
        sent += all_reduce_cost(part.numel() * part.element_size(), RANKS).num_bytes
        dist.all_reduce(part)
        return part

    x = w["x"]
    a = x + summed(attend(*(heads_of(x @ rows[n].T) for n in "qkv")) @ columns["o"].T)
    return a + summed(gated(a, rows["gate"], rows["up"]) @ columns["down"].T) + w["bias"], sent


def exchange(
    parts: list[Tensor], rank: int, shapes: list[torch.Size]
) -> tuple[list[Tensor], float]:
    """Send parts[r] to rank r, return what came and the bytes that left."""
    received = [torch.empty(shape, dtype=torch.float64) for shape in shapes]
    received[rank] = parts[rank]
    other = 1 - rank
    requests = [dist.isend(parts[other].contiguous(), other), dist.irecv(received[other], other)]
    for request in requests:
        assert request is not None
        request.wait()
    return received, float(parts[other].numel() * parts[other].element_size())


def sequence_parallel(w: dict[str, Tensor], rank: int) -> tuple[Tensor, float]:
    """Tokens are split; all-to-all makes heads of them and back. Returns this rank's tokens."""
    shards = token_shards(TOKENS, RANKS)
    x = torch.split(w["x"], shards)[rank]
    made, sent = [], 0.0
    for name in "qkv":
        by_heads = list(heads_of(x @ w[name].T).chunk(RANKS, 0))
        mine = by_heads[rank].shape[0]
        shapes = [torch.Size((mine, count, DIM)) for count in shards]
        came, left = exchange(by_heads, rank, shapes)
        made.append(torch.cat(came, 1))
        sent += left
    out = attend(*made)
    back, left = exchange(
        list(torch.split(out, shards)), rank, [torch.Size((len(x), out.shape[1]))] * RANKS
    )
    a = x + torch.cat(back, 1) @ w["o"].T
    return a + gated(a, w["gate"], w["up"]) @ w["down"].T + w["bias"], sent + left


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    w = weights()
    right = whole(w)
    tensor, reduced = tensor_parallel(w, rank)
    sequence, moved = sequence_parallel(w, rank)
    mine = torch.split(right, token_shards(TOKENS, RANKS))[rank]
    print(
        json.dumps(
            {
                "tensor_error": (tensor - right).abs().max().item(),
                "sequence_error": (sequence - mine).abs().max().item(),
                "all_reduce_bytes": reduced,
                "all_to_all_bytes": moved,
            }
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
