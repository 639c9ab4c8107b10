"""A check whose models may run their own code is marked on its page."""

from quantwatch_dashboard.components.facts import own_code


def test_variants_with_code_of_their_own_are_named() -> None:
    """Catches an opt-in that nobody sees."""
    candidates = [{"name": "fused", "allow_code": True}, {"name": "int8", "allow_code": False}]
    config = {"reference": {"allow_code": True}, "candidates": candidates}
    assert list(own_code(config)) == [("runs its own code", "reference, fused")]


def test_other_checks_have_no_mark() -> None:
    """Catches a mark that is on everything, and a run without a configuration."""
    assert list(own_code({"reference": {}, "candidates": [{"name": "int8"}]})) == []
    assert list(own_code({})) == []
