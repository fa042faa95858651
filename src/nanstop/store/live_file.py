"""``live.jsonl``: the numbers of a run as they come, written only while somebody follows it.

Who follows touches ``live.wanted`` in the run's folder, again and again; the run looks for it now
and then, and appends a line of JSON at a time. The first line is of the training that was begun. A
reader takes whole lines, so that the folder may lie on a disk that several machines share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanstop.errors import NanstopError
from nanstop.store.files import require_plain, write_whole

LIVE = "live.jsonl"
WANTED = "live.wanted"
MAX_BYTES = 512 * 2**20

_FADES_SECONDS = 60.0
"""After which a wish that was not renewed is over."""


class Wish:
    """Whether somebody follows the run in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / WANTED
        self._stamp: int | None = None
        self._renewed = 0.0

    def renew(self) -> None:
        """Say that the run is followed. Errors: ``OSError``."""
        self._file.touch(mode=0o666)
        os.utime(self._file)

    def is_fresh(self, now: float) -> bool:
        """Return whether the wish was renewed within the last minute, by this process's clock:
        those of two machines need not agree.
        """
        try:
            stamp = self._file.stat().st_mtime_ns
        except OSError:
            return False
        if stamp != self._stamp:
            self._stamp, self._renewed = stamp, now
        return now - self._renewed < _FADES_SECONDS

    def drop(self) -> None:
        """Say that the run is no longer followed."""
        with suppress(OSError):
            self._file.unlink()


class LiveFile:
    """Writes the live file of one training, in the place of an earlier one's.
    Errors: ``OSError``.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        known = {"training": os.urandom(8).hex(), "at": time.time(), **header}
        line = _line(known)
        write_whole(folder / LIVE, line)
        self._handle = os.open(folder / LIVE, os.O_WRONLY | os.O_APPEND)
        self.num_bytes = len(line)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line, with the time."""
        line = _line({"at": time.time(), **entry})
        os.write(self._handle, line)
        self.num_bytes += len(line)

    def close(self) -> None:
        """Write no more."""
        os.close(self._handle)


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


class LiveLines:
    """Reads the live file of a folder, of anybody's, as it grows."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LIVE
        self._offset = 0
        self._first = b""

    def new(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the lines that have come, and whether they are those of a training that was begun
        since, from its first line. What is no line of ours is left out.
        """
        try:
            require_plain(self._file)
            with self._file.open("rb") as stream:
                first = stream.readline(2**16)
                begun = first != self._first or stream.seek(0, os.SEEK_END) < self._offset
                if begun:
                    self._first, self._offset = first, 0
                stream.seek(self._offset)
                data = stream.read(MAX_BYTES)
        except (OSError, NanstopError):
            return [], False
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [entry for line in data[:end].splitlines() if (entry := _entry(line))], begun


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
