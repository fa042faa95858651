"""Keys of a YAML or JSON file that a run was started with, edited without touching the rest."""

from __future__ import annotations

import json
import re

from nanstop.rewrite.arguments import Settings
from nanstop.rewrite.source import Edit

_OTHER_NAMES = {
    "dtype": ("torch_dtype",),
    "max_grad_norm": ("gradient_clipping",),
    "optim": ("optimizer",),
}


def with_settings(text: str, settings: Settings, *, is_json: bool) -> list[Edit]:
    """Return the edits that give a flat mapping these keys; none where it has them already.

    A key that says no is not added: ``fp16: false`` where nothing spoke of it.
    """
    edits: list[Edit] = []
    for key, value in settings.items():
        given = [_given(text, name, is_json) for name in (key, *_OTHER_NAMES.get(key, ()))]
        found = next((match for match in given if match is not None), None)
        said = json.dumps(value) if is_json or isinstance(value, bool) else str(value)
        if found is not None:
            known = text[slice(*found.span("value"))]
            edits += [] if known == said else [Edit(*found.span("value"), said)]
        elif value is not False:
            edits.append(_added(text, key, said, is_json))
    return edits


def _given(text: str, key: str, is_json: bool) -> re.Match[str] | None:
    name = re.escape(key)
    if is_json:
        return re.search(rf'"{name}"\s*:\s*(?P<value>"[^"]*"|[^\s,}}\]]+)', text)
    return re.search(
        rf"^{name}[ \t]*:[ \t]*(?P<value>[^\s#][^\r\n#]*?)[ \t]*(?=#|\r|\n|\Z)", text, re.M
    )


def _added(text: str, key: str, value: str, is_json: bool) -> Edit:
    end = "\r\n" if "\r\n" in text else "\n"
    if is_json:
        at = text.index("{") + 1
        comma = "" if text[at:].lstrip().startswith("}") else ","
        return Edit(at, at, f'{end}  "{key}": {value}{comma}')
    first = "" if not text or text.endswith(("\n", "\r")) else end
    return Edit(len(text), len(text), f"{first}{key}: {value}{end}")
