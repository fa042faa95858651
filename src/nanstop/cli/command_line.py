"""How words on the command line are read, and what is said about those that cannot be."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from nanstop.errors import NanstopError, unknown
from nanstop.language.choice import LANGUAGES, VARIABLE

UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]
"""The base of all complaints about usage, which typer has under no public name."""
_OTHER_NAMES = {"--dir": "--out", "--folder": "--out", "--output-dir": "--out"}
_OTHER_NAMES |= {"--policy": "--on-failure", "--mode": "--on-failure", "--timeout": "--hang"}
"""What other programs call options of ours."""


class Commands(TyperGroup):
    """The group of commands, with nanstop's own error for one that does not exist."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return what typer found for ``args``. Errors: ``NanstopError`` NS001."""
        name = args[0]
        if name in self.commands:
            return super().resolve_command(ctx, args)
        if name.endswith(".py") or Path(name).is_file():
            command = shlex.join(["nanstop", "run", *args])
            raise NanstopError(f"`{name}` is a script, not a command", hint=f"try `{command}`")
        raise unknown("command", name, self.commands)


class OwnCommand(TyperCommand):
    """A command of ours. A folder may begin with ``~``: no shell reads it in ``--out=~/runs``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words as ever, and paths among them as a shell would have handed them over."""
        left = super().parse_args(ctx, args)
        given = [one for one in self.params if ctx.params.get(one.name)]
        for one in given:
            value = ctx.params[one.name]
            many = isinstance(value, tuple | list)
            at_home = [_at_home(each, one) for each in value] if many else _at_home(value, one)
            ctx.params[one.name] = at_home
        return left


def _at_home(value: Any, parameter: Any) -> Any:
    """Return the value of a parameter, a path without its ``~``: older typers have it as text."""
    kind = getattr(getattr(parameter, "type", None), "name", "")
    if isinstance(value, Path):
        return value.expanduser()
    return str(Path(value).expanduser()) if kind == "path" else value


class RunCommand(OwnCommand):
    """``nanstop run``: our options end where the user's command begins."""

    words_before = 0
    """Arguments of ours before the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put ``--`` before the first word that is neither an option of ours nor its value."""
        options = [one for one in self.params if isinstance(one, TyperOption) and not one.is_flag]
        takes_value = {name for one in options for name in one.opts}
        end, left = 0, self.words_before
        while end < len(args) and args[end] not in ("-m", "--"):
            is_option = args[end].startswith("-")
            if not is_option and not left:
                break
            left -= not is_option
            name, joined, _ = args[end].partition("=")
            end += 2 if name in takes_value and not joined else 1
        rest = args[end + 1 :] if args[end : end + 1] == ["--"] else args[end:]
        return super().parse_args(ctx, [*args[:end], "--", *rest])


class AgainCommand(RunCommand):
    """``nanstop replay``: the incident's folder comes before the user's command."""

    words_before = 1


class CheckCommand(RunCommand):
    """``nanstop check``: our switches, and the file to write, may also stand last.

    Not where ``--`` says that all that follows is the script's.
    """

    writes = "--sarif"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move what is ours from the end to the front."""
        switches = {
            name
            for one in self.params
            if isinstance(one, TyperOption) and one.is_flag
            for name in one.opts
        }
        end = len(args)
        while "--" not in args and end:
            is_joined = args[end - 1].startswith(f"{self.writes}=")
            if args[end - 1] in switches or is_joined:
                end -= 1
            elif args[end - 2 : end - 1] == [self.writes]:
                end -= 2
            else:
                break
        return super().parse_args(ctx, [*args[end:], *args[:end]])


def asked(words: Sequence[str]) -> dict[str, str]:
    """Return the variable of the language that is asked for among words that could not be read."""
    pairs = [*pairwise(words), *(word.split("=", 1) for word in words if "=" in word)]
    langs = [lang for option, lang in pairs if option == "--lang" and lang in LANGUAGES]
    return {VARIABLE: langs[0]} if langs else {}


def usage_error(error: Any) -> NanstopError:
    """Return typer's complaint as ours."""
    context = getattr(error, "ctx", None)  # None of an option whose value is missing
    command = context.command_path if context is not None else "nanstop"
    option = getattr(error, "option_name", None)
    if option and context is not None:
        choices = [name for one in context.command.params for name in one.opts if name[:1] == "-"]
        meant = _OTHER_NAMES.get(option)
        return unknown(f"option of `{command}`", option, choices, meant=meant)
    message = error.format_message().rstrip(".")
    return NanstopError(message[:1].lower() + message[1:], hint=f"see `{command} --help`")
