"""The page of a run while a command trains it: another process, so that neither waits for the
other.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from nanstop.commands.view.view import require_libraries
from nanstop.store.live_file import Wish

LAST_SECONDS = 2.5
"""That the page is served on after the run, for browsers to be told of its end."""


@contextmanager
def beside(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Serve the page of the run in ``folder`` as long as the block runs, a little longer where the
    block ends by itself. ``tell`` is told the address, and what is served afterwards.

    Errors: ``NanstopError`` where a library is missing.
    """
    require_libraries()
    folder.mkdir(parents=True, exist_ok=True)
    Wish(folder).renew()
    command = [sys.executable, "-m", "nanstop", "view", "--", str(folder)]
    # Ctrl-C is the command's; the page ends after it.
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    teller = Thread(target=_tell_address, args=(server, tell), daemon=True)
    teller.start()
    try:
        yield
        _wait(server)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        teller.join(timeout=1)
        assert server.stdout is not None
        server.stdout.close()
    tell(f"the page has ended; `nanstop view {folder}` serves it again")


def _tell_address(server: subprocess.Popen[str], tell: Callable[[str], None]) -> None:
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    if address:
        tell(f"nanstop: follow this run at {address}")


def _wait(server: subprocess.Popen[str]) -> None:
    try:
        server.wait(timeout=LAST_SECONDS)
    except subprocess.TimeoutExpired:
        return
