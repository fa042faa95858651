"""Two configurations of one training script, what differs between them, and the command for any
mixture of the two.

A configuration is a mapping, nested or flat: a YAML or JSON file, or the options of a command line.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanstop.errors import NanstopError
from nanstop.process.children.command import resolve_command
from nanstop.store.config_file import CONFIGS, load_config, not_found

KeyPath = tuple[str, ...]

EXCLUSIVE = (
    ("bf16", "fp16"),
    ("bf16_full_eval", "fp16_full_eval"),
    ("load_in_4bit", "load_in_8bit"),
)
"""Settings that no trainer takes together; a mixture that would switch on both is never tried."""

PLACES = ("output_dir", "logging_dir")
"""Settings that say where to write: each trial writes into a folder of its own."""

LEFT_OUT = ("push_to_hub", "run_name")
"""Settings that no trial gets: a trial is not published."""

_MISSING: Any = object()
_OVERRIDE = re.compile(r"^[A-Za-z_+~][\w.+/@~-]*=")
_NUMBER = re.compile(r"^-\.?\d")


@dataclass(frozen=True, slots=True)
class ConfigForm:
    """A script that reads a config file, given by ``--config FILE`` or as its first argument."""

    program: tuple[str, ...]
    suffix: str
    by_option: bool

    def command(self, settings: Mapping[str, Any], folder: Path) -> list[str]:
        """Write the config into ``folder`` and return the command that reads it.

        Errors: ``OSError``.
        """
        file = folder / f"config{self.suffix}"
        file.write_text(_dump(settings, self.suffix), encoding="utf-8")
        return [*self.program, *(["--config"] if self.by_option else []), str(file)]


@dataclass(frozen=True, slots=True)
class CommandForm:
    """A command line.

    Its first words, its options in an order that suits both, and which are written ``NAME=VALUE``.
    """

    program: tuple[str, ...]
    order: tuple[str, ...]
    joined: frozenset[str]

    def command(self, settings: Mapping[str, Any], _folder: Path) -> list[str]:
        """Return the command with these options."""
        words = list(self.program)
        for key in (key for key in self.order if key in settings):
            name, first, rest = key.partition("#")[0], settings[key][:1], settings[key][1:]
            words += [f"{name}={first[0]}", *rest] if key in self.joined else [name, *settings[key]]
        return words


@dataclass(frozen=True, slots=True)
class Pair:
    """Two configurations.

    ``items``: what may be taken from the bad one, by name; most hold one key.
    """

    bad: Mapping[str, Any]
    good: Mapping[str, Any]
    form: ConfigForm | CommandForm
    items: Mapping[str, tuple[KeyPath, ...]] = field(init=False)

    def __post_init__(self) -> None:
        differing = {path: (bad, good) for path, bad, good in _differences(self.bad, self.good)}
        object.__setattr__(self, "items", dict(_items(differing)))

    def mixed(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the good configuration with these items as in the bad one."""
        settings = copy.deepcopy(dict(self.good))
        for path in (path for name in names for path in self.items[name]):
            _set(settings, path, _at(self.bad, path))
        return settings

    def placed(self, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return the settings with every place to write to inside ``folder``."""
        places = {key: _plain(key) for key in settings}
        inside = {key: str(folder / name) for key, name in places.items() if name in PLACES}
        as_words = isinstance(self.form, CommandForm)
        return {
            **settings,
            **{key: [place] if as_words else place for key, place in inside.items()},
        }

    def words(self) -> list[str]:
        """Return the program and every text among the values of both configurations."""
        return [*self.form.program, *_texts(self.bad), *_texts(self.good)]

    def values(self, names: Iterable[str]) -> dict[str, tuple[str, str]]:
        """Return what each key of these items is in the bad and in the good configuration, as
        text.
        """
        return {
            ".".join(path): (self._shown(self.bad, path), self._shown(self.good, path))
            for name in names
            for path in self.items[name]
        }

    def keys(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the dotted keys of these items."""
        return tuple(".".join(path) for name in names for path in self.items[name])

    def _shown(self, settings: Mapping[str, Any], path: KeyPath) -> str:
        value = _at(settings, path)
        if value is _MISSING:
            return "(not set)"
        if isinstance(self.form, CommandForm):
            return shlex.join(value) or "(set)"
        return json.dumps(value, default=str)


def read_pair(bad: str, good: str, script: str | None = None) -> Pair:
    """Return two config files of ``script``, or two command lines, as a pair with at least one
    difference.

    Errors: ``NanstopError`` NS001 for files that are missing or no mappings, commands of different
    programs, or configurations that say the same.
    """
    files = [_is_config(one) for one in (bad, good)]
    if any(files):
        if not all(files):
            raise NanstopError("BAD and GOOD must be two config files, or two command lines")
        pair = _config_pair(Path(bad), Path(good), script)
    else:
        pair = _command_pair(bad, good, script)
    if not pair.items:
        raise NanstopError(
            "BAD and GOOD say the same: there is nothing to bisect",
            hint=f"{', '.join(PLACES + LEFT_OUT)} are not compared; each trial has its own",
        )
    return pair


def _is_config(given: str) -> bool:
    path = Path(given)
    if path.is_file():
        return path.suffix in CONFIGS
    if len(given.split()) < 2:
        raise not_found(path)
    return False


def _config_pair(bad: Path, good: Path, script: str | None) -> Pair:
    if not script:
        raise NanstopError("which script reads these configs?", hint="add --script train.py")
    words = [script] if Path(script).is_file() else _words(script)
    program = resolve_command(words)
    by_option = _takes_option(words)
    form = ConfigForm(tuple(program), bad.suffix, by_option)
    return Pair(_without_left_out(load_config(bad)), _without_left_out(load_config(good)), form)


def _takes_option(words: Sequence[str]) -> bool:
    """Return whether a script takes ``--config FILE``, as those of TRL do, by its own text."""
    if Path(words[0]).name == "trl":
        return True
    scripts = [Path(word) for word in words if word.endswith(".py") and Path(word).is_file()]
    texts = (one.read_text(encoding="utf-8", errors="replace") for one in scripts)
    return any("--config" in text or "TrlParser" in text for text in texts)


def _dump(settings: Mapping[str, Any], suffix: str) -> str:
    import yaml

    if suffix == ".json":
        return json.dumps(settings, indent=1)
    return yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)


def _command_pair(bad: str, good: str, script: str | None) -> Pair:
    if script:
        raise NanstopError("--script goes with two config files; these are command lines")
    (head, bad_options, bad_joined), (other, good_options, good_joined) = map(_parsed, (bad, good))
    if head != other:
        raise NanstopError(
            f"the commands are of different programs: `{shlex.join(head)}`, `{shlex.join(other)}`",
            hint="BAD and GOOD are two sets of options of one script",
        )
    form = CommandForm(
        tuple(resolve_command(head)),
        _merged(list(bad_options), list(good_options)),
        bad_joined | good_joined,
    )
    return Pair(_without_left_out(bad_options), _without_left_out(good_options), form)


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise NanstopError(f"`{command}` is no command line ({error})") from error


def _parsed(command: str) -> tuple[list[str], dict[str, list[str]], frozenset[str]]:
    """Return a command's first words, its options with their values, and the options written
    ``NAME=VALUE``.
    """
    words = _words(command)
    head: list[str] = []
    options: dict[str, list[str]] = {}
    joined = set()
    values = head
    for place, word in enumerate(words):
        is_option = word.startswith("-") and not _NUMBER.match(word) and word != "-"
        if not (is_option or _OVERRIDE.match(word)) or place == 0:
            values.append(word)
            continue
        name, equals, value = word.partition("=")
        count = sum(key.partition("#")[0] == name for key in options)
        key = f"{name}#{count + 1}" if count else name
        values = options[key] = [value] if equals else []
        if equals:
            joined.add(key)
    return head, options, frozenset(joined)


def _merged(first: list[str], second: list[str]) -> tuple[str, ...]:
    """Return all of ``first``, with what only ``second`` has behind its predecessor there."""
    order, place = list(first), 0
    for one in second:
        if one not in order:
            order.insert(place, one)
        place = order.index(one) + 1
    return tuple(order)


def _without_left_out(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if _plain(key) not in LEFT_OUT}


def _plain(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def _differences(
    bad: Mapping[str, Any], good: Mapping[str, Any], path: KeyPath = ()
) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Yield (path, bad value, good value) of every leaf that differs.

    In a part that one side lacks, of each leaf.
    """
    for key in _merged(list(bad), list(good)):
        ours, theirs = bad.get(key, _MISSING), good.get(key, _MISSING)
        inner = [value for value in (ours, theirs) if value is not _MISSING]
        here = (*path, str(key))
        if not path and _plain(key) in PLACES:
            continue
        if all(isinstance(value, dict) for value in inner) and any(inner):
            ours, theirs = ({} if value is _MISSING else value for value in (ours, theirs))
            yield from _differences(ours, theirs, here)
        elif repr(ours) != repr(theirs):  # 1, 1.0 and true are equal, but not the same setting
            yield here, ours, theirs


def _items(
    differing: Mapping[KeyPath, tuple[Any, Any]],
) -> Iterator[tuple[str, tuple[KeyPath, ...]]]:
    """Yield each difference under its dotted name, those that exclude each other as one."""
    taken: set[KeyPath] = set()
    for path in differing:
        if path in taken:
            continue
        partner = next((one for one in _excluded(path, differing) if one not in taken), None)
        paths = (path,) if partner is None else (path, partner)
        taken.update(paths)
        yield "+".join(".".join(one) for one in paths), paths


def _excluded(path: KeyPath, differing: Mapping[KeyPath, tuple[Any, Any]]) -> Iterator[KeyPath]:
    """Yield the differing keys that must change sides together with ``path``: some mixture would
    have both on.
    """
    name = _plain(path[-1])
    partners = {one for group in EXCLUSIVE if name in group for one in group if one != name}
    for other, (bad, good) in differing.items():
        if other[:-1] == path[:-1] and _plain(other[-1]) in partners:
            ours_bad, ours_good = differing[path]
            if (_on(ours_bad) and _on(good)) or (_on(ours_good) and _on(bad)):
                yield other


def _on(value: Any) -> bool:
    if isinstance(value, list):  # an option without a value is a switch
        return not value or value[0].lower() not in ("false", "0", "no")
    return value is not _MISSING and bool(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _at(settings: Any, path: KeyPath) -> Any:
    for key in path:
        settings = settings.get(key, _MISSING) if isinstance(settings, dict) else _MISSING
    return settings


def _set(settings: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Put ``value`` at ``path``, or take away what is there and whatever is empty without it."""
    first, *rest = path
    if rest:
        inner = settings.setdefault(first, {})
        _set(inner, tuple(rest), value)
        if not inner and value is _MISSING:
            del settings[first]
    elif value is _MISSING:
        settings.pop(first, None)
    else:
        settings[first] = copy.deepcopy(value)
