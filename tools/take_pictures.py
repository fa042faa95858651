"""Take the pictures of README and site anew: ``python tools/take_pictures.py``.

The incident of the tutorial is made for real: the terminal's picture is what ``nanstop run`` wrote
to one, the report's is its HTML page. Needs chromium and nanstop's own environment.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

SITE = Path(__file__).resolve().parents[1] / "docs" / "site"
COLUMNS = 112
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def in_terminal(command: list[str], folder: Path) -> str:
    """Return what a command writes to a terminal of ``COLUMNS`` columns, with its colours."""
    parent, child = pty.openpty()
    env = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=child, stderr=child)
    os.close(child)
    parts = []
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:  # the terminal is gone with its last writer
            break
        if not part:
            break
        parts.append(part)
    process.wait()
    return b"".join(parts).decode().replace("\r\n", "\n")


def shoot(page: Path, target: Path, width: int, height: int) -> None:
    """Write a picture of a page at a phone's density."""
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    size = f"--window-size={width},{height}"
    subprocess.run(
        [browser, *options, size, f"--screenshot={target}", page.as_uri()],
        check=True,
        capture_output=True,
    )


def main() -> int:
    """Write ``terminal.png`` and ``report.png``."""
    tutorial = (SITE / "tutorial.md").read_text(encoding="utf-8")
    script = re.search(r'```python title="train.py"\n(.*?)^```', tutorial, re.DOTALL | re.MULTILINE)
    assert script is not None
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(script[1])
        said = in_terminal([sys.executable, "-m", "nanstop", "run", "train.py"], folder)
        text = Text.from_ansi("$ nanstop run train.py\n" + said.strip())
        with Path(os.devnull).open("w") as nowhere:
            console = Console(record=True, width=COLUMNS, file=nowhere)
            console.print(text)
        drawn = console.export_svg(title="nanstop run train.py", theme=MONOKAI)
        drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # no network
        height = round(float(re.search(r'viewBox="0 0 \S+ (\S+)"', drawn)[1]))  # type: ignore[index]
        width = round(float(re.search(r'viewBox="0 0 (\S+) \S+"', drawn)[1]))  # type: ignore[index]
        page = folder / "terminal.html"
        page.write_text(f"<body style='margin:0'>{drawn}", encoding="utf-8")
        shoot(page, SITE / "images" / "terminal.png", width, height)
        shoot(folder / ".nanstop" / "report.html", SITE / "images" / "report.png", 1000, 1390)
    return 0


if __name__ == "__main__":
    sys.exit(main())
