"""What a command line starts."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from nanstop.errors import NanstopError
from nanstop.language.translate import translated

_PYTHON_FILES = (".py", ".pyw", ".pyz", ".zip")


_NOTEBOOK = (
    "in the notebook: `import nanstop; nanstop.watch(trainer)` before `trainer.train()`; "
    "or `jupyter nbconvert --to script` makes a script of it"
)
_LAUNCHERS = ("accelerate", "deepspeed", "python", "torchrun", "trl")


def resolve_command(args: Sequence[str]) -> list[str]:
    """Return the command to start.

    A script or ``-m MODULE`` under this Python, else a program and its arguments.

    A program is looked for on PATH, then beside this Python. Errors:
    ``NanstopError`` NS001 for one that is not there.
    """
    if not args:
        raise NanstopError("nothing to run", hint="nanstop run SCRIPT | -m MODULE | COMMAND ...")
    first, *rest = args
    if first == "-m":
        if not rest:
            raise NanstopError("-m needs the name of a module")
        return [sys.executable, *args]
    if first.startswith("-"):
        raise NanstopError(f"unknown option: `{first}`", hint="options of nanstop: nanstop run -h")
    if first.endswith(".ipynb"):
        raise NanstopError(f"{first} is a notebook and cannot be run as a script", hint=_NOTEBOOK)
    first = os.path.expanduser(first)  # noqa: PTH111  (`./x` is to stay `./x`)
    if _is_python(Path(first)):
        return [sys.executable, first, *rest]
    program = shutil.which(first) or shutil.which(first, path=str(Path(sys.executable).parent))
    if program is None:
        raise _missing(first)
    return [program, *rest]


def _is_python(path: Path) -> bool:
    if path.suffix in _PYTHON_FILES:
        if not path.exists():
            raise _missing(str(path))
        return True
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise NanstopError(f"{path} is a folder without __main__.py")
        return True
    return path.is_file() and not os.access(path, os.X_OK)


def _missing(name: str) -> NanstopError:
    path = Path(name)
    folder = path.parent if path.parent.is_dir() else Path()
    scripts = [str(folder / one.name) for one in folder.glob("*.py")]
    is_script = path.suffix in _PYTHON_FILES or path.name != name
    near = difflib.get_close_matches(name, scripts if is_script else [*scripts, *_LAUNCHERS], n=1)
    what = "script" if is_script else "program"
    if near == [name]:
        hint = f"`{name}` is not on PATH: start the environment that it is installed in"
    else:
        hint = f"did you mean `{near[0]}`?" if near else ""
    return NanstopError(f"no such {what}: {name}", hint=hint)


def mention_ours(command: Sequence[str], ours: Sequence[str]) -> None:
    """Say of one of ``ours``, options that only nanstop has, that it stands where it is the
    command's.
    """
    late = [word for word in command[1:] if word.partition("=")[0] in ours]
    if late:
        note = f"note: `{late[0]}` stands after the command and is given to it, not to nanstop"
        sys.stderr.write(f"{translated(note)}\n")
