"""What runs on this machine."""

import contextlib
from pathlib import Path


def commands_with(*words):
    """The command lines that contain each of ``words``, of all processes there are."""
    lines = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):
                lines.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return [line for line in lines if all(str(word) in line for word in words)]
