"""Tiny random models of many architectures, suites of random tokens, and sinks that remember."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import nn

from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.report import CaptureReport
from quantwatch.capture.side_by_side import capture_suite
from quantwatch.domain import Fingerprint, Observation, Prompt, Suite, TokenMatrix, Variant
from quantwatch.models.anatomy import resolve
from quantwatch.models.loaded import LoadedModel

torch.set_num_threads(1)

VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MLA = {
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
    **{"v_head_dim": 8, "num_key_value_heads": 4, "moe_intermediate_size": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "n_shared_experts": 1},
}
_WINDOW = {"head_dim": 8, "sliding_window": 8}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "llama-tied": ("LlamaConfig", {**_SIZES, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 8}),
    "gpt2": ("GPT2Config", {**_GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "gemma2": ("Gemma2Config", {**_SIZES, **_WINDOW, "final_logit_softcapping": 1.0}),
    "gemma3": ("Gemma3TextConfig", {**_SIZES, **_WINDOW}),
    "deepseek-v3": ("DeepseekV3Config", {**_SIZES, **_MLA}),
    "qwen2-moe": ("Qwen2MoeConfig", {**_SIZES, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_SIZES, **_EXPERTS, "head_dim": 8}),
    "mixtral": (
        "MixtralConfig",
        {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt-neox": ("GPTNeoXConfig", {k: v for k, v in _SIZES.items() if "key_value" not in k}),
    "opt": ("OPTConfig", {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt-350m": (
        "OPTConfig",
        {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "phi": ("PhiConfig", _SIZES),
    "bloom": ("BloomConfig", {**_GPT2, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2}),
    "cohere": ("CohereConfig", {**_SIZES, "logit_scale": 0.25}),
    "granite": ("GraniteConfig", {**_SIZES, "logits_scaling": 4.0}),
}
for _unused in ("n_positions", "n_embd"):
    CONFIGS["bloom"][1].pop(_unused)


class OwnBlock(nn.Module):
    """A block of one's own, with an in-place residual: `h += …` changes what a hook has seen."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.attn = nn.Linear(width, width)
        self.ffn = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(1, h.shape[1] + 1).view(1, -1, 1)
        h += self.attn(h.cumsum(1) / steps)
        h += self.ffn(h)
        return h


class OwnModel(nn.Module):
    """A causal language model of one's own: no configuration, no mask, logits returned bare."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(80, 32)
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(3))
        self.closing_norm = nn.LayerNorm(32)
        self.unembed = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            h = block(h)
        logits: torch.Tensor = self.unembed(self.closing_norm(h))
        return logits


def build_model(architecture: str, **changes: Any) -> nn.Module:
    """Build a tiny model with random weights large enough that its logits differ."""
    torch.manual_seed(0)
    if architecture == "own":
        return OwnModel().eval()
    kind, sizes = CONFIGS[architecture]
    config = getattr(transformers, kind)(**{**sizes, **changes})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(5.0)
    return model


def perturb(module: nn.Module, amount: float = 0.01, seed: int = 1) -> nn.Module:
    """Return a copy whose every parameter is off by about `amount` of itself."""
    torch.manual_seed(seed)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1 + amount * torch.randn_like(parameter))
    return copied


def load(module: nn.Module, name: str = "model", **changes: Any) -> LoadedModel:
    variant = Variant(name, Fingerprint(*[""] * 6), "float32", 0, 32.0, {})
    dtype = next(module.parameters()).dtype
    fields = {"num_tokens": None, "max_positions": 64, "dtype": dtype, **changes}
    return LoadedModel(module, None, variant, resolve(module), **fields)


def make_suite(
    lengths: Sequence[int], *, score_start: int = 0, seed: int = 0, vocabulary: int = VOCABULARY
) -> Suite:
    """Return a suite of random tokens; every third prompt shares a category."""
    generator = np.random.default_rng(seed)
    prompts = []
    for index, length in enumerate(lengths):
        ids = tuple(int(token) for token in generator.integers(3, vocabulary, length))
        prompts.append(Prompt(index, f"c{index % 3}", "test", ids, (), score_start=score_start))
    return Suite("test", "ab" * 32, tuple(prompts))


class Memory:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.observations: list[Observation] = []

    def observe(self, observation: Observation) -> None:
        self.observations.append(observation)

    def of(self, candidate: str, prompt: int) -> Observation:
        (found,) = (o for o in self.observations if (o.candidate, o.prompt) == (candidate, prompt))
        return found

    def matrices(self, candidate: str, metric: str) -> list[TokenMatrix]:
        return [
            matrix
            for observation in self.observations
            if observation.candidate == candidate
            for matrix in observation.matrices
            if matrix.metric == metric
        ]

    def row(
        self, candidate: str, prompt: int, metric: str, scope: str, role: str = "sample"
    ) -> tuple[NDArray[np.float64], NDArray[np.int64] | None]:
        """Return values and positions of one metric at one scope of one prompt."""
        (found,) = (
            (matrix.values[matrix.scopes.index(scope)], matrix.positions)
            for matrix in self.of(candidate, prompt).matrices
            if matrix.metric == metric and scope in matrix.scopes and matrix.role == role
        )
        return found

    def largest(self, candidate: str, metric: str) -> dict[str, float]:
        """Return the largest sampled value per scope over all prompts."""
        found: dict[str, float] = {}
        for matrix in self.matrices(candidate, metric):
            for scope, values in zip(matrix.scopes, matrix.values, strict=True):
                if matrix.role == "sample" and values.size:
                    found[scope] = max(found.get(scope, -np.inf), float(values.max()))
        return found


class Steps:
    """A progress that adds up; it may press Ctrl-C after so many tokens."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.total = 0
        self.done = 0
        self._interrupt_after = interrupt_after

    def start(self, stage: str, total_tokens: int) -> None:
        self.total += total_tokens

    def advance(self, tokens: int) -> None:
        self.done += tokens
        if self._interrupt_after is not None and self.done >= self._interrupt_after:
            raise KeyboardInterrupt


@dataclass
class Captured:
    report: CaptureReport
    sink: Memory
    floor: Memory
    steps: Steps = field(default_factory=Steps)


def capture(
    reference: nn.Module | LoadedModel,
    candidates: Mapping[str, nn.Module | LoadedModel],
    suite: Suite,
    plan: CapturePlan | None = None,
) -> Captured:
    loaded = {n: m if isinstance(m, LoadedModel) else load(m, n) for n, m in candidates.items()}
    reference = reference if isinstance(reference, LoadedModel) else load(reference, "reference")
    sink, floor, steps = Memory(), Memory(), Steps()
    plan = plan or CapturePlan(batch_tokens=64)
    report = capture_suite({"reference": reference, **loaded}, suite, plan, sink, floor, steps)
    return Captured(report, sink, floor, steps)


@dataclass(frozen=True)
class Kit:
    """The helpers of this folder (test modules can't import one another)."""

    architectures: tuple[str, ...] = (*CONFIGS, "own")
    build: Callable[..., nn.Module] = build_model
    perturb: Callable[..., nn.Module] = perturb
    load: Callable[..., LoadedModel] = load
    suite: Callable[..., Suite] = make_suite
    capture: Callable[..., Captured] = capture
    memory: type[Memory] = Memory
    steps: type[Steps] = Steps


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that name an `architecture` on every one."""
    if "architecture" in metafunc.fixturenames:
        metafunc.parametrize("architecture", Kit().architectures, scope="module")
