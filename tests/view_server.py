"""A view in a process of its own, and what it answers."""

import http.client
import os
import subprocess
import sys
from contextlib import contextmanager
from urllib.parse import urlsplit


@contextmanager
def served(*folders, port=None):
    """The address under which the runs in ``folders`` are served."""
    chosen = ["--port", str(port)] if port is not None else []
    command = [sys.executable, "-W", "error", "-m", "nanstop", "view", *chosen]
    process = subprocess.Popen(
        [*command, *map(str, folders)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        address = process.stdout.readline().strip()
        assert address, process.stderr.read()
        yield address
    finally:
        process.terminate()
        _, said = process.communicate(timeout=60)
        assert "Traceback" not in said, said
        assert "Warning" not in said, said


def ask(address, *, path=None, host=None):
    """(status, headers, body) of a page."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    connection.request(
        "GET", parts.path if path is None else path, headers={"Host": host} if host else {}
    )
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found
