"""Records to JSON and back. NaN, infinities, -0.0 and subnormals survive; what is read is validated.

Non-finite floats are strings ("NaN", "Infinity", "-Infinity"), because JSON has no other way to keep them.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from nanstop import records
from nanstop.errors import NanstopError

MAX_CHARS = 64 * 2**20
"""Longest text that ``from_json`` reads; records hold numbers and names and stay far below."""

T = TypeVar("T")


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_json(record: object) -> str:
    """Return the record as JSON, its fields in the order of their definition."""
    return _adapter(type(record)).dump_json(record).decode()


def from_json(kind: type[T], text: str) -> T:
    """Return the record of class ``kind`` that ``text`` holds.

    Errors: ``NanstopError`` NS001 for text that is too long, no JSON, or does not fit the class; the message has the
    path of the first key that is wrong.
    """
    if len(text) > MAX_CHARS:
        raise NanstopError(f"{kind.__name__}: longer than {MAX_CHARS // 2**20} Mi characters")
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


class _Schema(GenerateJsonSchema):
    """JSON Schema in which a float may be one of the three strings that JSON has no number for."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        words = {"enum": ["NaN", "Infinity", "-Infinity"], "type": "string"}
        return {"anyOf": [super().float_schema(schema), words]}


def schema(kind: type = records.Report) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a record as ``to_json`` writes it."""
    made = _adapter(kind).json_schema(mode="serialization", schema_generator=_Schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"schema {records.SCHEMA}; non-finite numbers are strings",
        **made,
    }
