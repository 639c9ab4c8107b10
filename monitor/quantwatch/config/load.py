"""Read quantwatch.toml. Every mistake in it becomes one ConfigError that names file and key."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantwatch.config.canary import canary_problems
from quantwatch.config.database import database_url
from quantwatch.config.default_rules import DEFAULT_RULES, applies, merge_rule
from quantwatch.config.files import validate_files
from quantwatch.config.parsing import parse, read_toml
from quantwatch.config.problems import config_error, dotted
from quantwatch.config.rules import RuleConfig
from quantwatch.config.schema import CandidateConfig, CheckConfig, Config
from quantwatch.errors import ConfigError

__all__ = ["database_url", "find_config", "load_config", "parse", "validate_files"]

FILE_NAME = "quantwatch.toml"
VARIABLE = "QUANTWATCH_CONFIG"
EXAMPLE = Path(__file__).with_name("example.toml")


def load_config(path: Path) -> Config:
    """Return the configuration in a file; raises ConfigError with up to ten mistakes at once."""
    config = parse(Config, read_toml(path), str(path))
    problems = [*_database_problems(config), *_rule_problems(config), *_canary_problems(config)]
    if problems:
        raise config_error(str(path), problems)
    return config


def find_config(start: Path, env: Mapping[str, str] = os.environ) -> Path | None:
    """Return QUANTWATCH_CONFIG, else the nearest quantwatch.toml in `start` or above it, else None.

    Raises ConfigError when the variable names a file that does not exist.
    """
    if named := env.get(VARIABLE):
        if not Path(named).is_file():
            raise ConfigError(f"{VARIABLE}: {named} does not exist or is not a file")
        return Path(named)
    folders = [start.absolute(), *start.absolute().parents]
    return next((f / FILE_NAME for f in folders if (f / FILE_NAME).is_file()), None)


def _database_problems(config: Config) -> Iterator[str]:
    try:
        database_url(config, {})
    except ConfigError as error:
        yield str(error)


def _rule_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with rules: they can only be judged beside those that they change."""
    for name, check in config.checks.items():
        yield from _problems_of_check(("checks", name), check)


def _canary_problems(config: Config) -> Iterator[str]:
    """Yield what keeps a canary from ever being seen.

    Files are refused, records are not: a run that was stored with such a canary can still be read.
    """
    for name, check in config.checks.items():
        for key, words in canary_problems(check):
            yield f"{dotted(('checks', name))}.{key}: {words}"


def _problems_of_check(location: tuple[int | str, ...], check: CheckConfig) -> Iterator[str]:
    known = {rule.name: rule for rule in DEFAULT_RULES}
    yield from _merge(known, check, location)
    for index, candidate in enumerate(check.candidates):
        at, rules = (*location, "candidates", index), dict(known)
        yield from _merge(rules, candidate, at)
        yield from _out_of_reach(rules, candidate, at)


def _out_of_reach(
    rules: dict[str, RuleConfig], candidate: CandidateConfig, location: tuple[int | str, ...]
) -> Iterator[str]:
    """Yield a candidate's own rules on what can't be measured of it: they would never decide."""
    for index, written in enumerate(candidate.rules):
        rule = rules.get(written.name)
        if rule is not None and rule.enabled and not applies(rule, candidate.served):
            which = (
                "no served" if candidate.served is None else f"a served ({candidate.served.api})"
            )
            yield (
                f"{dotted((*location, 'rules', index))}: {rule.metric} is not measurable: "
                f"{candidate.name} is {which} candidate"
            )


def _merge(
    known: dict[str, RuleConfig], section: Any, location: tuple[int | str, ...]
) -> Iterator[str]:
    """Merge a section's rules into the known ones; yield the problems."""
    for index, written in enumerate(section.rules):
        try:
            known[written.name] = merge_rule(known, written)
        except ConfigError as error:
            yield f"{dotted((*location, 'rules', index))}: {error}"
