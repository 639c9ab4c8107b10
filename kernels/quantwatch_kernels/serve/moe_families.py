"""What the router modules of transformers do: the one place that knows each family's rule.

A table of classes of transformers 5.24, because a look at attributes can't tell a softmax from a
sigmoid in a forward. Three kinds:

- softmax over all experts, the k largest, renormalized always (Mixtral, …) or as the module's
  `norm_topk_prob` says (Qwen-MoE, OLMoE, …);
- softmax over the k largest logits, which is the same function (Granite, gpt-oss);
- DeepSeek-V3's sigmoids in groups, with its bias and factor.

All of them return (logits [T, E], weights [T, k], ids [T, k]). What isn't in the table is named
with that reason, never guessed. A later transformers may change a class of the table: who reads a
choice holds it against the rule (`moe_margin`).
"""

from torch import Tensor, nn

from quantwatch_kernels.serve.moe_grouped import GroupedRouter
from quantwatch_kernels.serve.moe_router import AnyRouter, Router

__all__ = ["family_rule", "read_choice"]

_RENORMALIZED = frozenset(
    {
        "MixtralTopKRouter", "MiniMaxTopKRouter", "Qwen3_5MoeTopKRouter",
        "Qwen3VLMoeTextTopKRouter", "Qwen3OmniMoeTextTopKRouter", "GptOssTopKRouter",
        "GraniteMoeTopKRouter", "GraniteMoeHybridTopKRouter", "GraniteMoeSharedTopKRouter",
    }
)  # fmt: skip
_AS_CONFIGURED = frozenset(
    {
        "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "Qwen3NextTopKRouter", "OlmoeTopKRouter",
        "FlexOlmoTopKRouter", "MellumTopKRouter",
    }
)  # fmt: skip
_GROUPED = frozenset(
    {
        "DeepseekV3TopkRouter", "DeepseekV32TopkRouter", "Dots1TopkRouter", "Glm4MoeTopkRouter",
        "Glm4MoeLiteTopkRouter", "Glm4vMoeTextTopkRouter", "ExaoneMoeTopkRouter",
        "MiMoV2FlashTopkRouter", "SolarOpenTopkRouter",
    }
)  # fmt: skip


def family_rule(module: nn.Module) -> AnyRouter | str:
    """Return the rule by which a router module chooses, or why none is known."""
    kind = type(module).__name__
    known = kind in _RENORMALIZED | _AS_CONFIGURED | _GROUPED
    if not known:
        return f"how {kind} chooses experts is not known"
    try:
        return _rule(kind, module)
    except AttributeError as error:
        return f"this version of {kind} is another: {error}"


def _rule(kind: str, module: nn.Module) -> AnyRouter:
    top_k = int(module.top_k)  # type: ignore[arg-type]
    if kind in _GROUPED:
        return GroupedRouter(
            top_k,
            module.get_buffer("e_score_correction_bias"),
            int(module.num_group),  # type: ignore[arg-type]
            int(module.topk_group),  # type: ignore[arg-type]
            float(module.routed_scaling_factor),  # type: ignore[arg-type]
            bool(module.norm_topk_prob),
        )
    return Router(top_k, renormalize=kind in _RENORMALIZED or bool(module.norm_topk_prob))


def read_choice(output: object) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return logits [T, E], weights [T, k] and ids [T, k] of what a known router returned.

    None where it is something else: a module that has been replaced, or another version.
    """
    if not (isinstance(output, tuple) and len(output) == 3):
        return None
    logits, weights, ids = output
    if not all(isinstance(each, Tensor) and each.ndim == 2 for each in output):
        return None
    floats = logits.is_floating_point() and weights.is_floating_point()
    fits = weights.shape == ids.shape and len(ids) == len(logits) and not ids.is_floating_point()
    return (logits, weights, ids) if floats and fits else None
