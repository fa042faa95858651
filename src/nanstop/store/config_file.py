"""Config files that users write: YAML or JSON, a mapping of names to values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from nanstop.errors import NanstopError, unknown
from nanstop.records import SourceLine
from nanstop.store.files import read_text

CONFIGS = (".yaml", ".yml", ".json")
"""What config files end with."""
_MAX_BYTES = 4 * 2**20

T = TypeVar("T")


def load_config(file: Path) -> dict[str, Any]:
    """Return the settings of a file, which is read as JSON where it ends with ``.json``.

    Errors: ``NanstopError`` NS001 for one that cannot be read, or is no mapping of names.
    """
    import yaml

    settings = _parsed(file, json.loads if file.suffix == ".json" else yaml.safe_load)
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise NanstopError(f"{file}: a config is a mapping of names to values")
    return settings


def config_lines(file: Path) -> dict[str, SourceLine]:
    """Return the line of each key of a mapping, those of merged ones (``<<``) included, as YAML
    reads it. Errors: as ``load_config``.
    """
    import yaml

    def lines_of(text: str) -> dict[str, SourceLine]:
        loader, lines = yaml.SafeLoader(text), text.splitlines()
        node: Any = loader.get_single_node()
        loader.flatten_mapping(node)
        places = {key.value: key.start_mark.line for key, _ in node.value}
        return {
            key: SourceLine(file=str(file), line=at + 1, function="", text=lines[at].strip())
            for key, at in places.items()
        }

    load_config(file)
    return _parsed(file, lines_of)


def not_found(file: Path) -> NanstopError:
    """Return the error of a config file that is not there, which names the ones beside it."""
    folder = file.parent if file.parent.is_dir() else Path()
    near = sorted(str(folder / one.name) for one in folder.iterdir() if one.suffix in CONFIGS)
    if near:
        return unknown("config file", file, near)
    return NanstopError(f"no such config file: {file}")


def _parsed(file: Path, parse: Callable[[str], T]) -> T:
    import yaml

    text = read_text(file.resolve(), _MAX_BYTES)
    try:
        return parse(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise NanstopError(f"{file}: not readable ({' '.join(str(error).split())})") from error
