"""Reading files that anybody may have written, and writing files whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from nanstop.errors import NanstopError
from nanstop.records import SCHEMA, codec

MAX_JSON_BYTES = 64 * 2**20

T = TypeVar("T")


def load_record(file: Path, kind: type[T]) -> T:
    """Return a record from a JSON file whose schema number is ours."""
    text = read_text(file, MAX_JSON_BYTES)
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NanstopError(f"{file}: not JSON ({error})") from error
    if not isinstance(plain, dict):
        raise NanstopError(f"{file}: not a nanstop record")
    check_schema(file, plain)
    try:
        return codec.from_json(kind, text)
    except NanstopError as error:
        raise NanstopError(f"{file}: {error.message}", code=error.code, hint=error.hint) from error


def check_schema(file: Path, plain: dict[str, Any]) -> None:
    """Raise ``NanstopError`` where a JSON object has another schema number than ours."""
    found = plain.get("schema")
    if found != SCHEMA or isinstance(found, bool):
        message = f"{file}: schema {found!r}, and this nanstop reads schema {SCHEMA}"
        raise NanstopError(message, hint="read it with the nanstop version that wrote it")


def read_text(file: Path, limit: int) -> str:
    """Return the text of a regular file that is no link and no longer than ``limit`` bytes."""
    try:
        require_plain(file)
        with file.open("rb") as stream:
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise NanstopError(
                f"{file}: larger than {limit // 2**20} MiB; nanstop writes no such file"
            )
        return data.decode()
    except UnicodeDecodeError as error:
        raise NanstopError(f"{file}: not UTF-8 text") from error
    except OSError as error:
        raise NanstopError(f"cannot read {file}: {error.strerror or error}") from error


def require_plain(file: Path) -> None:
    """Refuse links (they may lead out of the folder) and devices or pipes (they may never end)."""
    mode = file.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise NanstopError(f"{file}: is a link; an incident holds only plain files")
    if not stat.S_ISREG(mode):
        raise NanstopError(f"{file}: is not a plain file")


def write_whole(path: Path, data: bytes) -> bool:
    """Return True once a flushed copy was renamed over the file, whose mode is kept.

    Errors: ``OSError``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if path.is_file():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder against other processes here; without file locks (Windows) do nothing."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network file system that has no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
