"""Globs over scopes."""

import pytest

from quantwatch.config.scopes import matches, scope_problem

MATCHES = [
    ("layers.*", "layers.12", True),
    ("layers.*", "layers.12.mlp", False),
    ("layers.*", "embedding", False),
    ("layers.*.mlp", "layers.12.mlp", True),
    ("layers.*.mlp", "layers.12.mlp.down_proj", False),
    ("layers.*.mlp.*", "layers.12.mlp.down_proj", True),
    ("layers.*.mlp.*", "layers.12.mlp", False),
    ("layers.1", "layers.12", False),
    ("layers.1?", "layers.12", True),
    ("*", "layers.12.mlp.down_proj", True),
    ("*", "model", True),
    ("head", "head", True),
    (("embedding", "head"), "head", True),
    (("embedding", "head"), "final_norm", False),
]


@pytest.mark.parametrize(("glob", "scope", "expected"), MATCHES)
def test_a_star_stands_for_one_component(
    glob: str | tuple[str, ...], scope: str, expected: bool
) -> None:
    """Catches `layers.*` matching every attention and MLP (fnmatch's own star crosses dots)."""
    assert matches(glob, scope) == expected


PROBLEMS = [
    ("layers.*", "lens_kl", False),
    ("layers.12", "lens_kl", False),
    ("layers.*.mlp", "lens_kl", True),
    ("model", "lens_kl", True),
    ("model", "topk_logit_deviation_k5", False),
    ("head", "isolated_error", False),
    ("layers.*.attention.q_proj", "isolated_error", False),
    ("layers.*.router", "isolated_error", False),
    ("model", "isolated_error", True),
    ("layers.*.self_attn", "isolated_error", True),
    ("layers.x", "isolated_error", True),
    ("layers.", "isolated_error", True),
    ("layer.3", "isolated_error", True),
    ("", "isolated_error", True),
    ("*", "logit_kl", False),
    ("*", "isolated_error", False),
]


@pytest.mark.parametrize(("glob", "metric", "refused"), PROBLEMS)
def test_a_glob_that_can_never_match_is_refused(glob: str, metric: str, refused: bool) -> None:
    """Catches a rule that silently never fires, and a good glob that is refused."""
    assert (scope_problem(glob, metric) is not None) == refused
