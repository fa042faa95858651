"""The line of nanstop's own at the foot of a terminal.

While an investigation holds a run up it says what is done and how long that may take; below a
run's own bars it says how the run stands. It is a bar of tqdm's, which knows where the bars of
transformers, TRL and of scripts are, and goes when one of these does: what a script prints without
bars would be mixed with a line that stands there. Below bars of rich's there is none.
"""

from __future__ import annotations

import io
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from nanstop.language.translate import translated
from nanstop.report.text.progress import Stage, progress_line, stage_lines

PATIENCE_SECONDS = 1.0
"""An investigation that is over by then is not spoken of."""


class TerminalLine:
    """Shows one line on the standard error stream, if that is a terminal. Never raises."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bar: Any = None
        self._stream: Any = None
        """The stream itself: a replay puts another in its place, so that nothing is printed."""
        self._began: float | None = None

    def stage(self, stage: Stage) -> None:
        """Say where an investigation is; a stage without a name is its end."""
        if not stage.name:
            self._began, self._stream = None, None
            self.clear()
            return
        if self._began is None:
            self._began, self._stream = self._clock(), sys.stderr
        if self._clock() - self._began >= PATIENCE_SECONDS:
            self._show("; ".join(stage_lines(stage)))

    def stepped(self, num_steps: int, numbers: Mapping[str, float]) -> None:
        """Say how a run stands, where it shows bars of its own."""
        bars = _bars(self._bar)
        if not bars:
            return
        self._stream = sys.stderr
        self._show(progress_line(num_steps, numbers))
        for bar in bars:
            self._go_with(bar)

    def clear(self) -> None:
        """Take the line away."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(Exception):  # a terminal that is gone
                bar.close()

    def _show(self, text: str) -> None:
        with suppress(Exception):
            if self._bar is None and _is_terminal(self._stream):
                self._bar = _line(self._stream)
            if self._bar is not None:
                self._bar.set_description_str(f"nanstop: {translated(text)}")

    def _go_with(self, bar: Any) -> None:
        """Take the line away ahead of a bar that closes: positions are counted from the top."""
        if self._bar is None or "close" in vars(bar):
            return
        line, closing = self, weakref.ref(bar)

        def close() -> None:
            line.clear()
            if (bar := closing()) is not None:
                del bar.close
                bar.close()

        bar.close = close


def _bars(own: Any) -> tuple[Any, ...]:
    """Return the bars of tqdm's that a script shows now. Nothing is imported for it."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    bars = tuple(getattr(tqdm, "_instances", ()))
    return tuple(bar for bar in bars if bar is not own and not getattr(bar, "disable", True))


def _is_terminal(stream: Any) -> bool:
    """Return whether it is one, and nobody collects what is written to it."""
    return isinstance(stream, io.TextIOWrapper) and stream.isatty()


def _line(stream: Any) -> Any:
    """Return a bar that is text and nothing else, and starts no thread."""
    from tqdm import tqdm

    class Line(tqdm):
        monitor_interval = 0

    return Line(total=0, bar_format="{desc}", leave=False, file=stream, dynamic_ncols=True)
