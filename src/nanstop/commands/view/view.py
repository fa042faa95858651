"""Serves the page of runs until it is ended."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanstop.errors import NanstopError
from nanstop.store.files import read_text

ADDRESS = "view.json"
"""Where a folder's page was served last: a browser that has it open finds it there again."""
HOST = "127.0.0.1"
_NEEDED = ("starlette", "uvicorn")


def view(
    folders: Sequence[Path],
    *,
    port: int | None = None,
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve the page of the runs in ``folders`` until the process is asked to end.

    ``port``: as it was before, where that is free, by default. ``ready`` is told the address.
    Errors: ``NanstopError`` where a library is missing or the port is taken.
    """
    require_libraries()
    import uvicorn

    from nanstop.commands.view.server import FollowedRuns, application

    known = _address(folders[0])
    token = known.get("token") or secrets.token_urlsafe(24)
    bound = _bound(known.get("port"), port)
    with bound as listening:
        number = listening.getsockname()[1]
        if number == known.get("port") or not known:
            _remember(folders[0], token, number)
        else:  # another view of this folder has the address that is known
            token = secrets.token_urlsafe(24)
        base = f"/{token}"
        board = FollowedRuns(folders, base)
        server = uvicorn.Server(
            uvicorn.Config(
                application(board, base, is_ending=lambda: server.should_exit),
                log_level="error",
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=3,
                ws="none",
            )
        )
        ready(f"http://{HOST}:{number}{base}/")
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


def require_libraries() -> None:
    """Raise ``NanstopError`` where what the page needs is not installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise NanstopError(
            f"the live view needs {' and '.join(missing)}", hint="pip install nanstop[live]"
        )


def _address(folder: Path) -> dict[str, Any]:
    """Return token and port of the folder's last page, {} where there is none of ours."""
    try:
        if not _is_private(folder / ADDRESS):
            return {}
        found = json.loads(read_text(folder / ADDRESS, 4096))
        token, port = found["token"], found["port"]
    except (NanstopError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    is_ours = isinstance(token, str) and len(token) == 32 and token.isascii()
    is_ours &= token.replace("-", "a").replace("_", "a").isalnum() if is_ours else False
    return {"token": token, "port": port} if is_ours and isinstance(port, int) else {}


def _remember(folder: Path, token: str, port: int) -> None:
    """Keep the address for the user alone, where the folder can be written."""
    text = json.dumps({"token": token, "port": port})
    with suppress(OSError):
        (folder / ADDRESS).unlink(missing_ok=True)
        handle = os.open(folder / ADDRESS, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)


def _is_private(file: Path) -> bool:
    """Return whether nobody but the user has written a file, or can read it."""
    found = file.lstat()
    return os.name != "posix" or (found.st_uid == os.getuid() and not found.st_mode & 0o077)


@contextmanager
def _bound(before: int | None, wanted: int | None) -> Iterator[socket.socket]:
    """Yield a socket that only this machine can reach."""
    tries = [wanted] if wanted is not None else [*([before] if before else []), 0]
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        if os.name == "posix":
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not any(_binds(one, port) for port in tries):
            raise NanstopError(f"port {tries[0]} cannot be used", hint="leave --port out")
        one.listen(64)  # from now on a browser that is told the address is not refused
        yield one


def _binds(one: socket.socket, port: int) -> bool:
    try:
        one.bind((HOST, port))
    except (OSError, OverflowError):  # another's, or no port at all
        return False
    return True
