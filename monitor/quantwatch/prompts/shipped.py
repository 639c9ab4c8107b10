"""The suites that come with quantwatch.

``core-v1``: prompts written for this project (Apache-2.0 like the rest of it), in nine categories;
``core-v1:demo``: sixteen of them, every category present. A shipped suite never changes: another
selection or another text gets another name.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files

from quantwatch.errors import PromptError
from quantwatch.prompts.records import RawPrompt, parse_json, parse_record


def shipped_suite(name: str) -> list[RawPrompt]:
    """Return the prompts of a shipped suite. Raises PromptError naming those that exist."""
    if name not in SUITES:
        known = ", ".join(SUITES)
        raise PromptError(f"unknown suite {name!r}; shipped: {known}; own prompts go into files")
    return SUITES[name]()


def _core() -> list[RawPrompt]:
    return list(_core_by_id().values())


def _core_demo() -> list[RawPrompt]:
    ids: list[str] = json.loads(_data("core-v1.demo.json"))
    return [_core_by_id()[prompt_id] for prompt_id in ids]


@cache
def _core_by_id() -> Mapping[str, RawPrompt]:
    lines = _data("core-v1.jsonl").strip("\n").split("\n")
    values = [parse_json(line, "core-v1", number) for number, line in enumerate(lines, 1)]
    return {value["id"]: _prompt(value) for value in values}


def _prompt(value: dict[str, str]) -> RawPrompt:
    where = f"core-v1, {value['id']}"
    return replace(parse_record(value, where, "core-v1", value["category"]), shipped=True)


def _data(name: str) -> str:
    return files("quantwatch.prompts").joinpath("data", name).read_text(encoding="utf-8")


SUITES: Mapping[str, Callable[[], list[RawPrompt]]] = {"core-v1": _core, "core-v1:demo": _core_demo}
