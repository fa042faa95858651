"""Records to JSON and back. NaN, infinities, -0.0 and subnormals survive;
what is read is validated.

Non-finite floats are strings ("NaN", "Infinity", "-Infinity"), because JSON has no other way to
keep them. Writing needs the standard library only: a watched process writes and never reads.
Pydantic is imported with the first reading.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from nanstop import records
from nanstop.errors import NanstopError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

MAX_CHARS = 64 * 2**20
"""Longest text that ``from_json`` reads; records hold numbers and names and stay far below."""

T = TypeVar("T")


def to_json(record: object) -> str:
    """Return the record as JSON, its fields in the order of their definition.

    Half a surrogate pair, as in a file name that is no UTF-8, has no place in JSON and becomes a
    question mark.
    """
    text = json.dumps(_plain(record), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode(errors="replace").decode()


def _plain(value: Any) -> Any:
    """Return what JSON has for a field: a record as an object, a non-finite float as a word."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int):
        return value
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value]


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def from_json(kind: type[T], text: str) -> T:
    """Return the record of class ``kind`` that ``text`` holds.

    Errors: ``NanstopError`` NS001 for text that is too long, no JSON, or does not fit the class;
    the message has the path of the first key that is wrong.
    """
    if len(text) > MAX_CHARS:
        raise NanstopError(f"{kind.__name__}: longer than {MAX_CHARS // 2**20} Mi characters")
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_json(text)
    except ValidationError as error:
        raise _refusal(kind, error) from error
    except RecursionError as error:
        raise NanstopError(f"{kind.__name__}: nested too deeply") from error


def _refusal(kind: type, error: ValidationError) -> NanstopError:
    problems = error.errors(include_url=False, include_input=False)
    first = problems[0]
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    message = f"{kind.__name__}{path}: {first['msg'][:1].lower()}{first['msg'][1:]}{more}"
    return NanstopError(message, hint="docs/report.schema.json describes what is accepted")


def schema(kind: type = records.Report) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a record as ``to_json`` writes it."""
    from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
    from pydantic_core import core_schema

    class Schema(GenerateJsonSchema):
        """A float may be one of the three strings that JSON has no number for."""

        def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
            words = {"enum": ["NaN", "Infinity", "-Infinity"], "type": "string"}
            return {"anyOf": [super().float_schema(schema), words]}

    made = _adapter(kind).json_schema(mode="serialization", schema_generator=Schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"schema {records.SCHEMA}; non-finite numbers are strings",
        **made,
    }
