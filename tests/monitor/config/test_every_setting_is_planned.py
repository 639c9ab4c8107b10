"""Whatever is edited shows up in the plan: every field of every section, found by itself."""

import types
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from quantwatch.config.apply import Applied, documents, plan, settings_documents
from quantwatch.config.load import parse
from quantwatch.config.schema import Config

VARIANT: dict[str, Any] = {
    "model": "org/m",
    "recipe": {
        "weights": "int8",
        "granularity": "channel",
        "layers": [{"match": "layers.0.*"}],
        "embedding": {"weights": "int8", "granularity": "channel"},
        "activations": {"format": "int8"},
        "rotation": {"values": True},
        "residual_dtype": [{"match": "layers.1", "dtype": "float16"}],
        "smooth": 0.5,
        "calibration": {"suite": {"name": "core-v1"}},
    },
    "serve": {"kv_cache": "int4+gain", "calibration": {"suite": {"name": "core-v1"}}},
    "faults": [{"scope": "layers.2.mlp.down_proj", "scale": 1.05}],
}
SETTINGS: dict[str, Any] = {
    "schema_version": 1,
    "checks": {
        "nightly": {
            "suite": {"name": "core-v1:demo"},
            "reference": {"model": "org/m"},
            "candidates": [
                VARIANT | {"name": "int8", "rules": [{"name": "own", "enabled": False}]},
                {"name": "served", "served": {"url": "http://localhost:8000", "api": "vllm"}},
            ],
            "rules": [{"name": "kl", "metric": "logit_kl", "threshold": 0.1}],
            "schedule": {"cron": "0 2 * * *"},
            "alerting": {"maintenance": [{"cron": "0 3 * * *", "length": "1h"}]},
            "canary": {"size": 0.02},
        }
    },
}
NOT_PLANNED = {
    "Config.schema_version": "there is one",
    "Config.database": "it says which database the plan is compared with",
    "Config.endpoints": "of each setting, in service/test_configuration.py, with its secrets",
}


def planned(before: Config, after: Config) -> list[str]:
    applied = Applied(documents(before), settings=settings_documents(before))
    return [str(change) for change in plan(after, None, applied)]


def edits(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each field below a value and the value with only that one edited."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            at = f"{type(value).__name__}.{name}"
            if at in NOT_PLANNED:
                continue
            inner = getattr(value, name)
            yield at, value.model_copy(update={name: other(inner, field.annotation)})
            for where, edited in edits(inner):
                yield where, value.model_copy(update={name: edited})
    elif isinstance(value, dict):
        for key, inner in value.items():
            for where, edited in edits(inner):
                yield where, {**value, key: edited}
    elif isinstance(value, tuple):
        for place, inner in enumerate(value):
            for where, edited in edits(inner):
                yield where, (*value[:place], edited, *value[place + 1 :])


def other(value: Any, annotation: Any) -> Any:
    """Return another value of the same type: what a person might write instead."""
    if isinstance(value, int | float):
        return not value if isinstance(value, bool) else value + 1
    if isinstance(value, str):
        choices = [one for one in choices_of(annotation) if one != value]
        return choices[0] if choices else f"{value}x"
    if isinstance(value, tuple | dict):
        return type(value)() if value else made(annotation)
    if value is None:
        return made(annotation)
    # A section that has to be there is another one by any of its fields.
    return None if type(None) in get_args(annotation) else next(edits(value))[1]


def made(annotation: Any) -> Any:
    """Return any value of a type but None, without asking whether it is sensible."""
    origin, args = get_origin(annotation), get_args(annotation)
    ways: dict[Any, Callable[[], Any]] = {
        Annotated: lambda: made(args[0]),
        Union: lambda: made(next(one for one in args if one is not type(None))),
        types.UnionType: lambda: made(next(one for one in args if one is not type(None))),
        Literal: lambda: args[0],
        tuple: lambda: tuple(made(one) for one in args if one is not Ellipsis),
        dict: lambda: {"x": made(args[1])},
    }
    if origin in ways:
        return ways[origin]()
    if issubclass(annotation, Enum):
        return next(iter(annotation))
    if not issubclass(annotation, BaseModel):
        return annotation(1)
    fields = annotation.model_fields.items()
    required = {name: made(one.annotation) for name, one in fields if one.is_required()}
    return annotation.model_construct(**required)


def choices_of(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return list(annotation)
    return [one for arg in get_args(annotation) for one in choices_of(arg)]


def sections(annotation: Any, found: set[type[BaseModel]]) -> set[type[BaseModel]]:
    """Return all sections that a type leads to."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation not in found:
            found.add(annotation)
            for field in annotation.model_fields.values():
                sections(field.annotation, found)
    else:
        for arg in get_args(annotation):
            sections(arg, found)
    return found


BEFORE = parse(Config, SETTINGS, "test")
EDITS = list(edits(BEFORE))


@pytest.mark.parametrize("after", [pytest.param(after, id=at) for at, after in EDITS])
def test_an_edit_is_planned(after: Config) -> None:
    """Catches a setting that is applied without having been planned."""
    assert planned(BEFORE, after), "the plan says that nothing changes"


def test_no_setting_is_left_out() -> None:
    """Catches a new section, or a new field, that this test doesn't edit."""
    unseen = {"EndpointConfig", "DatabaseConfig"}
    every = {
        f"{section.__name__}.{name}"
        for section in sections(Config, set())
        for name in section.model_fields
        if section.__name__ not in unseen
    }
    assert every - set(NOT_PLANNED) == {at for at, _ in EDITS}


ENDPOINTS = {
    "chat": {"url": "https://example.com/a", "format": "slack"},
    "own": {"url": "https://example.com/b", "format": "template", "body": '{"a": {{ title }}}'},
}


def test_what_is_handed_on_is_what_was_written() -> None:
    """Catches a check of what was *written*: a worker's process is handed every key."""
    written = parse(Config, {**SETTINGS, "endpoints": ENDPOINTS}, "test")
    assert parse(Config, written.model_dump(mode="json"), "a process") == written


def test_nothing_edited_is_nothing_planned() -> None:
    """Catches a plan that is never empty."""
    assert planned(BEFORE, parse(Config, SETTINGS, "test")) == []
