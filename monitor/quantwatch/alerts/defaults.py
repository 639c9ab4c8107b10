"""The default rules. They live with the configuration, which has to check what overrides them."""

from quantwatch.config.default_rules import DEFAULT_RULES

__all__ = ["DEFAULT_RULES"]
