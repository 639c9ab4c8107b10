"""The serving engine against `generate()` on SmolLM2-135M float32, one thread, as JSON.

- eight: 8 requests at once against 8 calls of `generate()`, one after the other;
- one: a single request against `generate()`;
- prefix: the time to the first token of a 2,048-token prompt of which all but one block is cached,
  as a share of a cold prefill by the engine, and of one by the model itself.

Both sides run on the same weights and take turns in every round, one thread pinned to a core; a
figure is the median of the rounds' ratios between the least and the most of them: that interval
holds the true median with a confidence of 1 − 2^(1 − rounds). Seconds are of CPU time, which others
on the machine disturb less. Token ids must be equal in every round, or nothing is printed.
"""

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs
import torch
from torch import Tensor

from quantwatch.config.schema import VariantConfig
from quantwatch.models.loading import load_variant
from quantwatch_kernels.serve.engine.batch import Limits
from quantwatch_kernels.serve.engine.engine import Engine, EngineConfig
from quantwatch_kernels.serve.engine.request import Request

TEXT = (Path(__file__).parents[1] / "README.md", Path(__file__).parents[1] / "docs/kernels.md")
PAGE = 16


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def interval(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
        "confidence": round(1 - 2.0 ** (1 - len(values)), 4),
    }


def alike(found: object, wanted: object) -> None:
    if found != wanted:
        raise SystemExit("token ids differ")


def generate(model: Any, ids: tuple[int, ...], new: int) -> tuple[int, ...]:
    given = torch.tensor([ids])
    # No eos: both sides then make equally many tokens.
    out = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(out[0, len(ids) :].tolist())


def throughput(
    models: tuple[Any, Any], prompts: list[tuple[int, ...]], new: int, rounds: int
) -> dict[str, Any]:
    plain, served = models
    ratios: list[float] = []
    times: dict[str, list[float]] = {"engine": [], "generate": []}
    wanted = [generate(plain, ids, new) for ids in prompts]
    config = EngineConfig(256, PAGE, Limits(512, 8), prefix_caching=False)
    with Engine(served, config) as engine:

        def run() -> list[tuple[int, ...]]:
            requests = [Request(str(n), ids, new) for n, ids in enumerate(prompts)]
            ended = engine.run(requests)
            return [ended[request.name].tokens for request in requests]

        alike(run(), wanted)
        for _ in range(rounds):
            for name, side in (
                ("engine", run),
                ("generate", lambda: [generate(plain, ids, new) for ids in prompts]),
            ):
                start = time.process_time()
                found = side()
                times[name].append(time.process_time() - start)
                alike(found, wanted)
            ratios.append(times["generate"][-1] / times["engine"][-1])
    tokens = new * len(prompts)
    return {
        "prompts": [len(ids) for ids in prompts],
        "new_tokens": new,
        "tokens_per_second": {
            name: round(tokens / statistics.median(each), 2) for name, each in times.items()
        },
        "times_generate": interval(ratios),
    }


def keep(seen: list[Tensor], _name: str, _position: int, logits: Tensor) -> None:
    seen.append(logits.clone())


def first_logits(engine: Engine, ids: tuple[int, ...], seen: list[Tensor]) -> tuple[Tensor, int]:
    seen.clear()
    outcome = engine.run([Request("one", ids, 1)])["one"]
    return seen[0], outcome.num_cached


def prefix(models: tuple[Any, Any], ids: tuple[int, ...], rounds: int) -> dict[str, Any]:
    plain, served = models
    found: dict[str, Any] = {"prompt": len(ids)}
    # 2,032 = 4 · 508: the cold prefill's last chunk is then the block that the warm one computes.
    for name, chunk in (("boundaries agree", 508), ("boundaries differ", 512)):
        seen: list[Tensor] = []
        limits = Limits(chunk, 1)
        with Engine(served, EngineConfig(160, PAGE, limits), partial(keep, seen)) as engine:
            cache = engine.blocks.manager.cache
            assert cache is not None
            shares, of_model, cold_s, warm_s, apart = [], [], [], [], []
            for _ in range(rounds):
                cache.clear()
                start = time.process_time()
                cold, none = first_logits(engine, ids, seen)
                middle = time.process_time()
                warm, cached = first_logits(engine, ids, seen)
                end = time.process_time()
                assert none == 0
                alike(int(warm.argmax()), int(cold.argmax()))
                apart.append(float((cold - warm).abs().max()))
                cold_s.append(middle - start)
                warm_s.append(end - middle)
                shares.append(warm_s[-1] / cold_s[-1])
                if name == "boundaries differ":
                    with torch.inference_mode():
                        given = torch.tensor([ids])
                        own = partial(plain, given, use_cache=True, logits_to_keep=1)
                        of_model.append(warm_s[-1] / seconds(own))
        found[name] = {
            "cached_tokens": cached,
            "cold_s": round(statistics.median(cold_s), 3),
            "warm_s": round(statistics.median(warm_s), 4),
            "share_of_cold": interval(shares),
            "bit_equal": not any(apart),
            "largest_logit_difference": max(apart),
        }
        if of_model:
            found[name]["share_of_the_models_own_prefill"] = interval(of_model)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=("eight", "one", "prefix"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {arguments.core})
    loaded = load_variant(
        "reference",
        VariantConfig(model="smollm2-135m"),
        base_dir=Path(),
        cache_dir=Path(platformdirs.user_cache_dir("quantwatch")),
    )
    plain: Any = loaded.module.eval()
    models = (plain, copy.deepcopy(plain))
    text = "\n".join(path.read_text() for path in TEXT)
    tokenizer: Any = loaded.tokenizer
    ids = tuple(tokenizer(text)["input_ids"])
    begins = [ids[300 * n : 300 * n + 24 + 16 * n] for n in range(8)]
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "eight": lambda: throughput(models, begins, arguments.new, arguments.rounds),
        "one": lambda: throughput(models, begins[3:4], arguments.new, 2 * arguments.rounds),
        "prefix": lambda: prefix(models, ids[:2048], max(3, arguments.rounds // 2)),
    }
    print(
        json.dumps(
            {
                "model": "SmolLM2-135M float32",
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                "rounds": arguments.rounds,
                **{name: part() for name, part in parts.items() if arguments.only in (None, name)},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
