"""Recipes written as files: what `load_recipe` reads back is the same recipe."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantwatch.config.recipes import RecipeConfig, load_recipe
from quantwatch.errors import UserError
from quantwatch.telemetry import write_whole


def recipe_toml(recipe: RecipeConfig, comments: Sequence[str] = ()) -> str:
    """Return a recipe as TOML, one `# ` line per comment first; keys at their defaults left out."""
    values = recipe.model_dump(mode="json", exclude_defaults=True)
    lines = [f"# {line}".rstrip() for comment in comments for line in comment.split("\n")]
    return "\n".join([*lines, *([""] if lines else []), *_table(values)]) + "\n"


def write_recipe(path: Path, recipe: RecipeConfig, comments: Sequence[str] = ()) -> None:
    """Write a recipe file and read it back. Raises UserError when that can't be done."""
    write_whole(path, recipe_toml(recipe, comments))
    if load_recipe(path) != recipe:
        raise UserError(f"{path}: what was written doesn't read back as the same recipe")


def _table(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the plain keys, then sub-tables, then lists of tables: TOML has no way back up."""
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lists = {key: value for key, value in values.items() if _is_list_of_tables(value)}
    for key, value in sorted(values.items(), key=lambda pair: pair[0] != "match"):
        if key not in tables and key not in lists and value is not None:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in tables.items():
        yield from ("", f"[{path}{_key(key)}]")
        yield from _table(value, f"{path}{_key(key)}.")
    for key, rows in lists.items():
        for row in rows:
            yield from ("", f"[[{path}{_key(key)}]]")
            yield from _table(row, f"{path}{_key(key)}.")


def _is_list_of_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _key(key: str) -> str:
    plain = key.replace("_", "").replace("-", "")
    return key if plain.isascii() and plain.isalnum() else json.dumps(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        # A TOML basic string is a JSON string, but for DEL, which it wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
